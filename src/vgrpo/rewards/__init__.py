"""What can be rewarded, by name; one file per kind. A reward scores pictures, one finite number each, or the run stops."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vgrpo.errors import RunError, UserError

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
            near = difflib.get_close_matches(kind, REWARDS, n=1, cutoff=0.5)
            hint = f", did you mean {near[0]!r}?" if near else ""
            raise UserError(
                f"no reward {kind!r}{hint}; there are {', '.join(REWARDS)}, or module:function for your own"
            )
        kind = REWARDS[kind]
    where, name = kind.rsplit(":", 1)
    module = load_file(Path(where)) if where.endswith(".py") else load_module(where)
    if not callable(found := getattr(module, name, None)):
        raise UserError(f"{where} has no function {name!r}")
    return found


def load_module(name: str) -> Any:
    if "" not in sys.path:
        sys.path.insert(0, "")  # a script's own folder, as `python -m` has it
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise UserError(f"cannot import {name}: there is no module {error.name!r}") from error


def load_file(path: Path) -> Any:
    if not path.is_file():
        raise UserError(f"no file {path}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def score(name: str, reward: Reward, images: Tensor, prompts: Sequence[Prompt]) -> Tensor:
    """`reward`'s scores [N], float64 on the CPU, of `images` uint8 [N, 3, H, W] and their N prompts.

    Raises:
        RunError: the reward raised, or gave anything but N finite numbers; names the reward and the prompts.
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
    except RunError:
        raise
    except Exception as error:  # a user's function may raise anything
        raise RunError(f"reward {name!r} raised {type(error).__name__}: {error}") from error
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
    bad = sorted({prompts[i].id for i in (~out.isfinite()).nonzero().flatten().tolist()})
    if bad:
        raise RunError(f"reward {name!r} gave no finite score for prompts {bad}; nothing was trained on this step")
    return out


def probe(name: str, reward: Reward, prompts: Sequence[Prompt]) -> None:
    """Scores two made-up pictures for `prompts`, so that a broken reward shows before any weight is loaded.

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

        return function([Image.fromarray(i.permute(1, 2, 0).numpy()) for i in images], [p.text for p in prompts])

    reward.__name__ = getattr(function, "__name__", "on_pil")
    return reward
