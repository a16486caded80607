"""What can be rewarded, by name; one file per kind. A reward scores pictures, one finite number each, or the run stops."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from vgrpo.errors import RunError, UserError
from vgrpo.lookup import find_object, nearest

if TYPE_CHECKING:
    from torch import Tensor

    from vgrpo.types import Prompt, Reward

REWARDS = {
    "shapes": "vgrpo.rewards.shapes:Shapes",
    "ocr": "vgrpo.rewards.ocr:Ocr",
    "brightness": "vgrpo.rewards.preference:Brightness",
    "colourfulness": "vgrpo.rewards.preference:Colourfulness",
    "sharpness": "vgrpo.rewards.preference:Sharpness",
    "jpeg": "vgrpo.rewards.preference:Jpeg",
}


def load(kind: str) -> Any:
    """The class of a reward of ours, or a user's own function from `module:function` or `path/to/file.py:function`.

    Raises:
        UserError: there is no such reward, module, file or function.
    """
    if ":" not in kind:
        if kind not in REWARDS:
            raise UserError(
                f"no reward {kind!r}{nearest(kind, REWARDS)}; there are {', '.join(REWARDS)}, "
                "or module:function for your own"
            )
        kind = REWARDS[kind]
    found = find_object(kind)
    if not callable(found):
        raise UserError(f"{kind} is no function but {type(found).__name__}")
    return found


def score(name: str, reward: Reward, images: Tensor, prompts: Sequence[Prompt]) -> Tensor:
    """`reward`'s scores [N], float64 on the CPU, of `images` uint8 [N, 3, H, W] and their N prompts.

    Raises:
        RunError: the reward raised, or gave anything but N finite numbers; names the reward and the prompts.
        UserError: what the reward needs is not installed.
    """
    import torch

    if images.dtype != torch.uint8 or images.ndim != 4 or images.shape[1] != 3 or len(images) != len(prompts):
        raise RunError(
            f"rewards score uint8 pictures [N, 3, H, W] with N prompts, got {images.dtype} {tuple(images.shape)} "
            f"and {len(prompts)} prompts"
        )
    if not len(images):
        return torch.zeros(0, dtype=torch.float64)
    try:
        scores = reward(images, prompts)
    except (RunError, UserError):
        raise
    except Exception as error:  # a user's function may raise anything
        raise RunError(f"reward {name!r} raised {type(error).__name__}: {error}, for prompts {ids(prompts)}") from error
    return checked(name, scores, prompts)


def checked(name: str, scores: Any, prompts: Sequence[Prompt]) -> Tensor:
    """`scores` as float64 [N]. Raises RunError unless they are N finite numbers."""
    import torch

    try:
        out = torch.as_tensor(scores).detach().to("cpu", torch.float64)
    except (TypeError, ValueError, RuntimeError) as error:
        raise RunError(
            f"reward {name!r} must give {len(prompts)} numbers, got {type(scores).__name__}: {error}"
        ) from error
    if out.shape != (len(prompts),):
        raise RunError(
            f"reward {name!r} must give one number per picture, shape ({len(prompts)},), got {tuple(out.shape)}"
        )
    bad = [p for p, fine in zip(prompts, out.isfinite().tolist(), strict=True) if not fine]
    if bad:
        raise RunError(f"reward {name!r} gave no finite score for prompts {ids(bad)}; nothing was trained on this step")
    return out


def ids(prompts: Sequence[Prompt], most: int = 8) -> str:
    """The first `most` different ids, as an error names them: "['3', '7'] and 24 more"."""
    found = list(dict.fromkeys(p.id for p in prompts))
    return str(found[:most]) + (f" and {len(found) - most} more" if len(found) > most else "")


def probe(name: str, reward: Reward, prompts: Sequence[Prompt]) -> None:
    """Scores a made-up picture for each of `prompts`, so that a broken reward shows before any weight is loaded.

    Raises:
        UserError: what `score` would say in the middle of a run.
    """
    import torch

    pictures = torch.randint(0, 256, (len(prompts), 3, 64, 64), generator=torch.Generator().manual_seed(0)).byte()
    try:
        score(name, reward, pictures, prompts)
    except RunError as error:
        raise UserError(f"the first try of a reward failed: {error}") from error


def on_pil(function: Callable[[list[Any], list[str]], Sequence[float]]) -> Reward:
    """A reward from a function of PIL pictures and prompt texts, the shape in which many scorers come.

    Example: `train(config, rewards={"mine": on_pil(lambda pictures, texts: [p.size[0] for p in pictures])})`
    """

    def reward(images: Tensor, prompts: Sequence[Prompt]) -> Any:
        from PIL import Image

        return function([Image.fromarray(i.permute(1, 2, 0).numpy()) for i in images.cpu()], [p.text for p in prompts])

    reward.__name__ = getattr(function, "__name__", "on_pil")
    return reward
