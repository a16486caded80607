"""Writes the prompt files of the embedded model, `src/vgrpo/assets/scenes/{train,test}.jsonl`, from `scenes.captions`.

    python tools/write_prompts.py

Tags are interleaved so that any even spread over a file meets each in the same proportion; captions that are held out
from pretraining are the test file.
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


def main() -> None:
    rng = np.random.default_rng(0)
    held_out = [c for c in scenes.captions() if scenes.is_held_out(c["text"])]
    kept = [c for c in scenes.captions() if not scenes.is_held_out(c["text"])]
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, captions, count in (("train", kept, 2000), ("test", held_out, 400)):
        lines = [json.dumps({"text": c["text"], **c["meta"]}) for c in mixed(captions, count, rng)]
        (FOLDER / f"{name}.jsonl").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
