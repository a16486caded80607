"""Writes the prompt files of the embedded model, `src/vgrpo/assets/scenes/{train,validation,test}.jsonl`.

    python tools/write_prompts.py

Tags are interleaved so that any even spread over a file meets each in the same proportion. Captions that are held out
from pretraining make the validation file, by which settings are chosen, and the test file, which is only reported. The
two share no caption but the one of the tag `single_object`, which has no other.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import scenes

FOLDER = Path(__file__).parents[1] / "src/vgrpo/assets/scenes"
SHARES = {
    "single_object": 0.05,
    "colors": 0.10,
    "counting": 0.20,
    "two_object": 0.10,
    "color_attr": 0.30,
    "position": 0.25,
}


def mixed(captions: list[dict], count: int, rng: np.random.Generator) -> list[dict]:
    """`count` captions with the tags in the proportions of SHARES; a small tag comes round more than once."""
    queues = {tag: [c for c in captions if c["meta"]["tag"] == tag] for tag in SHARES}
    for queue in queues.values():
        rng.shuffle(queue)
    taken, debt, out = dict.fromkeys(SHARES, 0), dict.fromkeys(SHARES, 0.0), []
    for _ in range(count):
        debt = {tag: debt[tag] + share for tag, share in SHARES.items()}
        tag = max(debt, key=lambda t: debt[t])
        debt[tag] -= 1
        out.append(queues[tag][taken[tag] % len(queues[tag])])
        taken[tag] += 1
    return out


def halves(captions: list[dict]) -> tuple[list[dict], list[dict]]:
    """Each tag's captions in two parts of equal size to within one, in the order of a hash of their text."""
    parts: tuple[list[dict], list[dict]] = ([], [])
    for tag in SHARES:
        own = sorted((c for c in captions if c["meta"]["tag"] == tag), key=lambda c: scenes.hashed(c["text"]))
        for part, chosen in zip(parts, (own[::2], own[1::2] or own), strict=True):
            part.extend(chosen)
    return parts


def main() -> None:
    held_out = [c for c in scenes.captions() if scenes.is_held_out(c["text"])]
    kept = [c for c in scenes.captions() if not scenes.is_held_out(c["text"])]
    validation, test = halves(held_out)
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, captions, count in (("train", kept, 2000), ("validation", validation, 400), ("test", test, 400)):
        rng = np.random.default_rng(0)
        lines = [json.dumps({"text": c["text"], **c["meta"]}) for c in mixed(captions, count, rng)]
        (FOLDER / f"{name}.jsonl").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
