"""The loop on a small real pipeline: it learns, and nothing that should not matter does."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from vgrpo import checkpoint
from vgrpo.config import parse, put
from vgrpo.errors import RunError, UserError
from vgrpo.run import Run
from vgrpo.training import learning_rate, train
from vgrpo.types import Prompt


def run_with(settings: dict[str, Any], **changes: Any) -> Run:
    settings = copy.deepcopy(settings)
    for key, value in changes.items():
        put(settings, key.replace("__", "."), value)
    return train(parse(settings))


def weights(run: Run) -> dict[str, torch.Tensor]:
    return dict(checkpoint.load(run.checkpoints).weights)


def assert_same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor], atol: float) -> None:
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=0, atol=atol, msg=lambda m, n=name: f"{n}: {m}")


def moved(run: Run) -> float:
    return max(w.abs().max().item() for n, w in weights(run).items() if "lora_B" in n)


STORED = {"update__per_rollout": 2, "update__passes": 2, "objective__clip": 2e-3, "objective__kl_weight": 0.3}


@pytest.mark.parametrize("changes", [{}, STORED], ids=["one update", "four updates, clip and KL"])
def test_micro_batch_and_joint_draws_do_not_matter(settings: dict[str, Any], changes: dict[str, Any]) -> None:
    one = run_with(settings, **changes, update__micro_batch=16)
    assert moved(one) > 1e-3
    for micro_batch, joint in ((1, False), (5, True), (16, True)):
        other = run_with(settings, **changes, update__micro_batch=micro_batch, update__joint_draws=joint)
        # Adam divides by the gradient's size, so rounding in a tiny gradient shows in full
        assert_same(weights(one), weights(other), atol=2e-4)
        assert other.metrics()[-1]["clip_fraction"] == pytest.approx(one.metrics()[-1]["clip_fraction"], abs=1e-6)


def test_rollout_micro_batch_does_not_matter(settings: dict[str, Any]) -> None:
    a, b = run_with(settings, rollout__micro_batch=16), run_with(settings, rollout__micro_batch=3)
    assert a.metrics()[0]["reward/mean"] == pytest.approx(b.metrics()[0]["reward/mean"], abs=1e-6)
    assert_same(weights(a), weights(b), atol=2e-3)


@pytest.mark.parametrize("per_rollout", [1, 2])
def test_skipping_the_old_pass_is_exact(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch, per_rollout: int
) -> None:
    from vgrpo import training

    skipped = run_with(settings, update__per_rollout=per_rollout)
    accumulate = training.accumulate

    def score_everything(job: Any, prepared: Any, whose: str) -> Any:
        everything = torch.arange(len(prepared.rollouts.x0))
        parts = [job.config.objective.score(job.policy, job.config.objective.batch(prepared, rows), joint=False)
                 for rows in everything.split(job.config.update.micro_batch)]  # fmt: skip
        return {"error": torch.cat([p["error"].detach() for p in parts], 1)}

    monkeypatch.setattr(training, "score_all", score_everything)
    monkeypatch.setattr(type(parse(settings).objective), "anchors", lambda self, updates: ("old",))
    monkeypatch.setattr(training, "accumulate", lambda *a, first: accumulate(*a, first=False))
    scored = run_with(settings, update__per_rollout=per_rollout)
    calls = [run.metrics()[0]["calls/old"] for run in (skipped, scored)]
    assert calls == [0 if per_rollout == 1 else 16, 32]
    assert moved(scored) > 1e-3
    assert_same(weights(skipped), weights(scored), atol=0)


def test_first_ratio_is_one_and_later_ones_are_not(settings: dict[str, Any]) -> None:
    row = run_with(settings, update__passes=2, objective__clip=1e-4).metrics()[0]
    assert row["ratio/first"] < 1e-6
    assert row["ratio/std"] > 1e-5
    assert row["clip_fraction"] > 0
    single = run_with(settings).metrics()[0]
    assert single["ratio/mean"] == pytest.approx(1, abs=1e-6)
    assert single["clip_fraction"] == 0


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_bfloat16_trains_float32_weights(settings: dict[str, Any], kind: str) -> None:
    settings["adapter"] = {"kind": kind}
    run = run_with(settings, model__dtype="bfloat16", update__passes=2)
    assert all(w.dtype == torch.float32 for w in weights(run).values())
    assert all(row["weight_change"] > 0 and row["ratio/first"] < 5e-2 for row in run.metrics())


def test_a_ratio_off_one_stops_the_run(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    from vgrpo.policies.pipeline import Pipeline

    predict = Pipeline.predict

    def another_when_scored(self: Any, x_t: torch.Tensor, t: torch.Tensor, cond: Any) -> torch.Tensor:
        return predict(self, x_t, t, cond) * (1 if torch.is_grad_enabled() else 1.01)

    monkeypatch.setattr(Pipeline, "predict", another_when_scored)
    for changes in ({}, STORED):
        with pytest.raises(RunError, match="before any update the ratio"):
            run_with(settings, **changes)


def test_resume_equals_a_straight_run(settings: dict[str, Any]) -> None:
    changes = STORED | {"run__ema": 0.9, "optimizer__schedule": "linear"}
    straight = run_with(settings, **changes, run__steps=4, run__save_every=2)
    broken = run_with(settings, **changes, run__steps=4, run__save_every=2)
    for path in checkpoint.complete(broken.checkpoints)[1:]:
        for f in path.iterdir():
            f.unlink()
        path.rmdir()
    resumed = train(parse(broken.settings()), resume=broken.folder)
    a, b = checkpoint.load(straight.checkpoints), checkpoint.load(resumed.checkpoints)
    assert (a.step, a.updates) == (b.step, b.updates) == (4, 16)
    for part in ("weights", "averaged", "moments"):
        assert_same(dict(getattr(a, part)), dict(getattr(b, part)), atol=0)
    untimed = [
        [{k: v for k, v in r.items() if "time" not in k and k != "seconds"} for r in run.metrics()]
        for run in (straight, resumed)
    ]
    assert untimed[0] == untimed[1]


def test_two_processes_equal_one(settings: dict[str, Any], tmp_path: Path) -> None:
    import yaml

    changes = {"update.per_rollout": 2, "objective.kl_weight": 0.3, "prompts.per_step": 3 + 1, "run.save_every": 1}
    for key, value in changes.items():
        put(settings, key, value)
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(settings))
    alone = train(parse(settings))
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--standalone"]
    env_settings = ["run.name=two", "run.threads=1"]
    done = subprocess.run(
        [*command, "-m", "vgrpo", "train", str(tmp_path / "recipe.yaml"), *env_settings],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    two = Run(Path(settings["run"]["folder"]) / "two")
    for a, b in zip(alone.metrics(), two.metrics(), strict=True):
        assert a["reward/mean"] == pytest.approx(b["reward/mean"], abs=1e-6)
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-3)
    assert_same(weights(alone), weights(two), atol=2e-3)
    scores = [
        json.loads((run.folder / "evaluations/step_00000/scores.json").read_text())["rows"] for run in (alone, two)
    ]
    assert [r["prompt_id"] for r in scores[0]] == [r["prompt_id"] for r in scores[1]]
    assert [r["scores"]["brightness"] for r in scores[0]] == pytest.approx(
        [r["scores"]["brightness"] for r in scores[1]], abs=1e-6
    )


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_it_learns(settings: dict[str, Any], kind: str) -> None:
    settings["adapter"] = {"kind": kind}
    lr = 5e-2 if kind == "lora" else 1e-2
    steps = {"run__steps": 12, "optimizer__lr": lr, "rollout__group_size": 8, "evaluation__images_per_prompt": 4}
    run = run_with(settings, **steps)
    before, after = (r["scores"]["brightness"] for r in run.evaluations())
    darker = run_with(settings, **steps, rewards__brightness={"weight": -1})
    assert after > before + 0.003  # the same seeds: what moves is the policy
    assert darker.evaluations()[-1]["scores"]["brightness"] < before - 0.003


def test_equal_rewards_teach_nothing_and_are_said(settings: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    run = train(parse(settings), rewards={"flat": lambda images, prompts: torch.zeros(len(images))})
    assert moved(run) == 0
    assert [r["zero_std_fraction"] for r in run.metrics()] == [1, 1]
    assert "no group has a spread" in caplog.text
    assert "this run has learnt nothing" in caplog.text


def test_two_equal_prompts_are_two_groups(settings: dict[str, Any]) -> None:
    seen: list[list[str]] = []

    def first_pixel(images: torch.Tensor, prompts: list[Prompt]) -> torch.Tensor:
        seen.append([p.text for p in prompts])
        return images[:, 0, 0, 0].float()

    run = train(parse(settings), rewards=[first_pixel], prompts=["a cat", "a cat"])
    assert ["a cat"] * 16 in seen
    assert run.metrics()[0]["images"] == 16


def bad_nan(images: torch.Tensor, prompts: Any) -> torch.Tensor:
    return torch.full((len(images),), float("nan")) if len(images) > 4 else images.float().mean((1, 2, 3))


def bad_shape(images: torch.Tensor, prompts: Any) -> torch.Tensor:
    return torch.zeros(len(images), 2) if len(images) > 4 else images.float().mean((1, 2, 3))


def bad_raise(images: torch.Tensor, prompts: Any) -> torch.Tensor:
    if len(images) > 4:
        raise ValueError("the scorer fell over")
    return images.float().mean((1, 2, 3))


@pytest.mark.parametrize(
    ("reward", "words"), [(bad_nan, "bad_nan"), (bad_shape, "bad_shape"), (bad_raise, "the scorer fell over")]
)
def test_a_bad_reward_stops_before_the_step(settings: dict[str, Any], reward: Any, words: str) -> None:
    with pytest.raises(RunError, match=words):
        train(parse(settings), rewards=[reward])


def test_a_reward_that_never_works_is_found_before_weights(settings: dict[str, Any]) -> None:
    settings["model"]["path"] = settings["model"]["path"]
    with pytest.raises(UserError, match="broken"):
        train(parse(settings), rewards={"broken": lambda images, prompts: torch.zeros(1, 7)})
    assert not Path(settings["run"]["folder"]).exists()


def test_non_finite_weights_stop_the_run_and_keep_the_checkpoint(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from vgrpo.policies.pipeline import Pipeline

    def infected(self: Any, x_t: torch.Tensor, t: torch.Tensor, cond: Any) -> torch.Tensor:
        out = predict(self, x_t, t, cond)
        return out * float("nan") if self.calls > limit and torch.is_grad_enabled() else out

    predict, limit = Pipeline.predict, 16 * 4 + 16 * 4 * 2
    monkeypatch.setattr(Pipeline, "predict", infected)
    with pytest.raises(RunError, match="step 2: .*(not finite|ratio)"):
        run_with(settings, run__save_every=1, run__steps=3)
    (run,) = [Run(p) for p in Path(settings["run"]["folder"]).iterdir()]
    state = checkpoint.load(run.checkpoints)
    assert state.step == 1
    assert all(w.isfinite().all() for w in state.weights.values())


def test_ema_is_evaluated_and_exported(settings: dict[str, Any]) -> None:
    run = run_with(settings, run__ema=0.9, run__steps=3)
    state = checkpoint.load(run.checkpoints)
    name = next(n for n in state.weights if "lora_B" in n)
    assert (state.weights[name] - state.averaged[name]).abs().max() > 1e-4
    exported = load_file(run.adapter / "pytorch_lora_weights.safetensors")
    module = name.split(".lora_B")[0]
    torch.testing.assert_close(exported[f"transformer.{module}.lora_B.weight"], state.averaged[name], rtol=0, atol=0)


def test_learning_rate_falls_as_asked(settings: dict[str, Any]) -> None:
    settings["optimizer"] = {"lr": 1.0, "schedule": "linear", "warmup": 2}
    settings["run"]["steps"] = 4
    config = parse(settings)
    assert [learning_rate(config, u) for u in range(4)] == pytest.approx([0.5, 0.75, 0.5, 0.25])


def test_the_run_folder_holds_what_a_person_needs(settings: dict[str, Any]) -> None:
    run = run_with(settings, run__sample_every=1)
    for name in (
        "config.yaml",
        "run.json",
        "metrics.jsonl",
        "evaluations.jsonl",
        "report.html",
        "adapter/settings.json",
        "samples/step_00001.png",
    ):
        assert (run.folder / name).is_file(), name
    assert parse(run.settings()).dump() == run.settings()
    again = run_with(settings)
    assert again.folder != run.folder
    row = run.metrics()[0]
    accounted = sum(v for k, v in row.items() if k.startswith("time/"))
    assert accounted == pytest.approx(row["seconds"], rel=1e-6)


def test_resume_refuses_another_rank(settings: dict[str, Any]) -> None:
    run = run_with(settings)
    put(changed := run.settings(), "adapter.rank", 8)
    with pytest.raises(UserError, match="adapter.rank differ"):
        train(parse(changed), resume=run.folder)


def test_trackers_are_fed(settings: dict[str, Any]) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = run_with(settings, run__trackers=["tensorboard"])
    events = EventAccumulator(str(run.folder)).Reload()
    logged = [e.value for e in events.Scalars("reward/mean")]
    assert logged == pytest.approx([row["reward/mean"] for row in run.metrics()], rel=1e-5)


def test_sample_and_eval_of_a_run(settings: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from PIL import Image

    from vgrpo.cli import main

    run = run_with(settings, run__steps=3, optimizer__lr=0.05)
    picture = tmp_path / "out.png"
    sample = ["sample", str(run.folder), "--prompt", "a red fox", "--images", "2", "--base", "--out", str(picture)]
    for command in (sample, ["eval", str(run.folder), "--images", "2"]):
        with pytest.raises(SystemExit) as ended:
            main(command)
        assert ended.value.code in (0, None)
    assert Image.open(picture).size == (4 * 32, 32)
    pixels = torch.tensor(list(Image.open(picture).convert("L").get_flattened_data()), dtype=torch.float32).view(
        32, 4, 32
    )
    assert not torch.equal(pixels[:, 0], pixels[:, 2])  # base and tuned on the same seed
    (row,) = json.loads((run.folder / "eval/comparison.json").read_text())["rows"]
    base, tuned = (json.loads((run.folder / f"eval/{w}/scores.json").read_text())["rows"] for w in ("base", "tuned"))
    gains = [b["scores"]["brightness"] - a["scores"]["brightness"] for a, b in zip(base, tuned, strict=True)]
    assert row["gain"]["mean"] == pytest.approx(sum(gains) / 8)
    assert [r["seed"] for r in base] == [r["seed"] for r in tuned]
    assert "brightness" in capsys.readouterr().out
