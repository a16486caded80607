"""Pictures and network calls per second of the embedded model, by part, on this machine.

    python bench/throughput.py          # writes bench/results/throughput.md

Each figure is the median of `REPEATS` timings after a warm-up, with the smallest and largest.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from vgrpo.config import load_recipe
from vgrpo.policies.pipeline import Pipeline
from vgrpo.run import hardware, versions
from vgrpo.types import Prompt

REPEATS, ROWS = 7, 128


def timed(work: Callable[[], object]) -> list[float]:
    work()
    out = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        work()
        out.append(time.perf_counter() - start)
    return out


def row(name: str, per_call: int, seconds: list[float]) -> str:
    rates = sorted(per_call / s for s in seconds)
    return f"| {name} | {statistics.median(rates):.0f} | {rates[0]:.0f} … {rates[-1]:.0f} |"


def measure(kind: str) -> list[str]:
    config = load_recipe("tiny", **{"adapter.kind": kind})
    policy = Pipeline(config, torch.device("cpu"))
    cond = policy.encode([Prompt(text="two red circles and a blue square", id=str(i)) for i in range(ROWS)])
    noise = policy.noise(range(ROWS))
    t = torch.full((ROWS,), 0.5)
    x0 = policy.sample(noise, cond)

    def backward() -> None:
        policy.predict(noise, t, cond).square().mean().backward()

    with torch.no_grad():
        forward = timed(lambda: policy.predict(noise, t, cond))
    steps = config.rollout.steps
    return [
        row(
            f"{kind}: network calls in a rollout of {steps} steps",
            ROWS * steps,
            timed(lambda: policy.sample(noise, cond)),
        ),
        row(f"{kind}: forward alone", ROWS, forward),
        row(f"{kind}: forward and backward", ROWS, timed(backward)),
        row(f"{kind}: VAE decoding", ROWS, timed(lambda: policy.decode(x0))),
    ]


def main() -> None:
    h, v = hardware(), versions()
    lines = [
        "# Throughput of the embedded model",
        "",
        f"`python bench/throughput.py`, {h['cpu']}, {h['cores']} cores, {h['threads']} threads, torch {v['torch']}; "
        f"batches of {ROWS}.",
        "",
        "| part | per second, median | range |",
        "|---|---|---|",
        *measure("lora"),
        *measure("full"),
    ]
    out = Path(__file__).parent / "results/throughput.md"
    out.parent.mkdir(exist_ok=True)
    out.write_text("\n".join(lines) + "\n")
    print(out.read_text())


if __name__ == "__main__":
    main()
