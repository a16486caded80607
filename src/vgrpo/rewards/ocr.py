"""Text in the picture, read by rapidocr (PP-OCR on ONNX) and compared with what the prompt quotes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict

from vgrpo.errors import RunError, UserError

if TYPE_CHECKING:
    from torch import Tensor

    from vgrpo.types import Prompt

QUOTED = re.compile(
    r'"([^"]*)"|“([^”]*)”|„([^“”]*)[“”]|«([^»]*)»|「([^」]*)」|(?<!\w)\'([^\']*(?:\w\'\w[^\']*)*)\'(?!\w)|‘([^’]*(?:\w’\w[^’]*)*)’(?!\w)'
)
"""Quoted parts of a prompt; an apostrophe inside a word is no quote."""


class Ocr(BaseModel):
    """How well the quoted text of a prompt can be read in its picture, in [0, 1].

    `distance` is 1 − the edit distance to the target over the target's length, at least 0; `contains` is 1 where the
    target stands anywhere in what was read, else 0. Case and blanks do not count. Needs `pip install 'vgrpo[ocr]'`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    mode: Literal["distance", "contains"] = "distance"

    def __call__(self, images: Tensor, prompts: Sequence[Prompt]) -> Tensor:
        """Scores [N] float64 of `images` uint8 [N, 3, H, W].

        Raises:
            RunError: a prompt quotes nothing.
            UserError: rapidocr is not installed.
        """
        import torch

        targets = [plain(quoted(p.text)) for p in prompts]
        silent = [p.id for p, target in zip(prompts, targets, strict=True) if not target]
        if silent:
            raise RunError(
                f'ocr needs a quoted text in each prompt, such as a sign that says "OPEN"; prompts {silent} have none'
            )
        read = [plain(recognised(reader()(image.permute(1, 2, 0).numpy()[..., ::-1].copy()))) for image in images.cpu()]
        scores = [
            float(t in r) if self.mode == "contains" else likeness(r, t) for r, t in zip(read, targets, strict=True)
        ]
        return torch.tensor(scores, dtype=torch.float64)


def quoted(text: str) -> str:
    """The quoted parts of a prompt, joined by blanks; empty if there are none."""
    return " ".join("".join(groups).strip() for groups in QUOTED.findall(text)).strip()


def plain(text: str) -> str:
    """What is compared: lower case, no blanks, one kind of apostrophe."""
    return "".join(text.lower().split()).replace("’", "'")


def likeness(read: str, target: str) -> float:
    return 1 - min(edit_distance(read, target), len(target)) / len(target)


def edit_distance(a: str, b: str) -> int:
    """Levenshtein's: insertions, deletions and replacements that make `b` of `a`."""
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        above, row = row, [i]
        for j, y in enumerate(b, 1):
            row.append(min(above[j] + 1, row[-1] + 1, above[j - 1] + (x != y)))
    return row[-1]


def recognised(result: Any) -> str:
    """The text in what an OCR engine gave, top to bottom; nothing found comes in many shapes and is ''."""
    texts = getattr(result, "txts", result)
    return " ".join(t for t in (() if texts is None else texts) if isinstance(t, str))


@cache
def reader() -> Any:
    """The engine, loaded once per process."""
    try:
        from rapidocr import RapidOCR
    except ImportError as error:
        raise UserError(f"the ocr reward needs rapidocr ({error}); pip install 'vgrpo[ocr]'") from error
    # by default small pictures are scaled up to 736 pixels, at seven times the cost
    return RapidOCR(params={"Det.limit_side_len": 256, "Det.limit_type": "max", "Global.log_level": "error"})
