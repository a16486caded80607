"""A diffusers pipeline as a policy: the same pictures as the stock call, the same network call, an export that loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline

from vgrpo.config import Config, parse
from vgrpo.errors import UserError
from vgrpo.policies.pipeline import Pipeline, check
from vgrpo.types import Prompt

PROMPTS = [Prompt(text="a red fox", id="1"), Prompt(text="two green cups", id="2")]
CPU = torch.device("cpu")


def stock(folder: Path) -> Any:
    pipe = DiffusionPipeline.from_pretrained(folder, local_files_only=True)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def call(pipe: Any, config: Config, seeds: list[int], **extra: Any) -> np.ndarray:
    out = pipe(
        prompt=[p.text for p in PROMPTS],
        generator=[torch.Generator().manual_seed(s) for s in seeds],
        num_inference_steps=config.rollout.steps,
        guidance_scale=config.rollout.guidance,
        height=config.model.height,
        width=config.model.width,
        max_sequence_length=config.model.max_sequence_length,
        **{"output_type": "np", **extra},
    )
    return out.images


@pytest.fixture
def config(settings: dict[str, Any]) -> Config:
    return parse(settings)


def shaken(policy: Pipeline) -> Pipeline:
    """LoRA starts as the identity; random weights make it visible."""
    generator = torch.Generator().manual_seed(7)
    policy.load({name: 0.3 * torch.randn(p.shape, generator=generator) for name, p in policy.trainable.items()})
    return policy


@pytest.mark.parametrize("guidance", [1.0, 3.0])
def test_rollout_equals_the_stock_pipeline_call(settings: dict[str, Any], mini: Path, guidance: float) -> None:
    settings["rollout"]["guidance"] = guidance
    config = parse(settings)
    policy = Pipeline(config, CPU)
    x0 = policy.sample(policy.noise([11, 12]), policy.encode(PROMPTS))
    ours = policy.decode(x0).permute(0, 2, 3, 1).float() / 255
    theirs = call(stock(mini), config, [11, 12])
    assert np.ptp(theirs) > 0.1  # a picture, not a constant
    np.testing.assert_allclose(ours.numpy(), theirs, atol=0.5 / 255 + 1e-4)
    latents = call(stock(mini), config, [11, 12], output_type="latent")
    torch.testing.assert_close(x0, torch.as_tensor(latents), rtol=0, atol=1e-5)


@pytest.mark.parametrize("sampler", ["pipeline", "euler", "heun", "dpmpp", "unipc"])
def test_predict_and_schedule_are_those_of_real_steps(settings: dict[str, Any], sampler: str) -> None:
    settings["rollout"]["sampler"] = sampler
    config = parse(settings)
    policy = shaken(Pipeline(config, CPU))
    seen: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
    hook = policy.net.register_forward_hook(
        lambda net, args, kwargs, out: seen.append((kwargs["hidden_states"], kwargs["timestep"], out[0])),
        with_kwargs=True,
    )
    cond = policy.encode(PROMPTS)
    policy.sample(policy.noise([1, 2]), cond)
    hook.remove()
    schedule = policy.schedule()
    used = torch.unique_consecutive(policy.pipe.scheduler.sigmas[policy.pipe.scheduler.sigmas > 0])
    torch.testing.assert_close(schedule, used.float(), rtol=0, atol=0)
    times = torch.unique_consecutive(torch.stack([t[0].float() for _, t, _ in seen])) / 1000
    # multistep solvers of diffusers truncate their timesteps to integers: up to 1e-3
    torch.testing.assert_close(times, schedule, rtol=0, atol=1e-6 if sampler in ("pipeline", "euler", "heun") else 1e-3)
    for x, timestep, out in seen:
        with torch.no_grad():
            mine = policy.predict(x, timestep.float() / 1000, cond)
        torch.testing.assert_close(mine, out, rtol=0, atol=1e-5)


def test_schedule_follows_a_resolution_dependent_shift(settings: dict[str, Any], mini: Path, tmp_path: Path) -> None:
    from diffusers import FlowMatchEulerDiscreteScheduler

    pipe = stock(mini)
    pipe.scheduler = FlowMatchEulerDiscreteScheduler(
        use_dynamic_shifting=True, base_image_seq_len=4, max_image_seq_len=64
    )
    pipe.save_pretrained(tmp_path / "dynamic")
    settings["model"]["path"] = str(tmp_path / "dynamic")
    config = parse(settings)
    policy = Pipeline(config, CPU)
    call(pipe, config, [1, 2])
    torch.testing.assert_close(policy.schedule(), pipe.scheduler.sigmas[:-1], rtol=0, atol=1e-7)
    assert policy.schedule()[1] != 0.75  # shifted


def test_exactly_the_adapter_is_trainable(config: Config) -> None:
    policy = Pipeline(config, CPU)
    assert policy.adapted == 2 * 8 - 1  # eight projections a block; the last block has no text output projection
    assert all("lora" in name for name in policy.trainable)
    assert len(policy.trainable) == 2 * policy.adapted
    parts = [p for p in policy.pipe.components.values() if isinstance(p, torch.nn.Module)]
    assert sum(p.requires_grad for part in parts for p in part.parameters()) == len(policy.trainable)


@pytest.mark.parametrize(("rank", "alpha"), [(4, 16), (4, 1), (2, 2)])
def test_exported_adapter_draws_the_same_picture_in_a_plain_pipeline(
    settings: dict[str, Any], mini: Path, tmp_path: Path, rank: int, alpha: int
) -> None:
    settings["adapter"] |= {"rank": rank, "alpha": alpha}
    config = parse(settings)
    policy = shaken(Pipeline(config, CPU))
    policy.export(tmp_path / "adapter")
    mine = policy.sample(policy.noise([5, 6]), policy.encode(PROMPTS))
    pipe = stock(mini)
    base = call(pipe, config, [5, 6], output_type="latent")
    pipe.load_lora_weights(tmp_path / "adapter")
    theirs = call(pipe, config, [5, 6], output_type="latent")
    torch.testing.assert_close(mine, torch.as_tensor(theirs), rtol=0, atol=1e-4)
    assert (torch.as_tensor(base) - mine).abs().max() > 1e-2


def test_full_fine_tuning_saves_a_pipeline_that_loads(settings: dict[str, Any], tmp_path: Path) -> None:
    settings["adapter"] = {"kind": "full"}
    config = parse(settings)
    policy = Pipeline(config, CPU)
    with torch.no_grad():
        for p in policy.trainable.values():
            p.mul_(1.05)
    policy.export(tmp_path / "tuned")
    mine = policy.sample(policy.noise([5, 6]), policy.encode(PROMPTS))
    theirs = call(stock(tmp_path / "tuned"), config, [5, 6], output_type="latent")
    torch.testing.assert_close(mine, torch.as_tensor(theirs), rtol=0, atol=1e-5)


def test_other_weights_are_used_and_put_back(config: Config) -> None:
    policy = Pipeline(config, CPU)
    before = {n: p.detach().clone() for n, p in policy.trainable.items()}
    ones = {n: torch.ones_like(p) for n, p in before.items()}
    with policy.using(ones):
        assert all((p == 1).all() for p in policy.trainable.values())
    assert all(torch.equal(p, before[n]) for n, p in policy.trainable.items())
    with pytest.raises(UserError, match="belong to another adapter"):
        policy.load({"x": torch.ones(1)})


def test_a_prompt_is_encoded_once(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = Pipeline(config, CPU)
    texts: list[str] = []
    encode = policy.family.encode
    monkeypatch.setattr(policy.family, "encode", lambda pipe, t, n: texts.extend(t) or encode(pipe, t, n))
    first = policy.encode([*PROMPTS, PROMPTS[0]])
    second = policy.encode(PROMPTS[::-1])
    assert sorted(texts) == sorted(p.text for p in PROMPTS)
    for key in first:
        assert torch.equal(first[key][0], first[key][2])
        assert torch.equal(first[key][:2].flip(0), second[key])


def test_targets_that_match_nothing_are_refused(settings: dict[str, Any]) -> None:
    settings["adapter"]["targets"] = ["to_nowhere"]
    with pytest.raises(UserError, match=r"none of \['to_nowhere'\] is a linear layer.*attn.to_q"):
        Pipeline(parse(settings), CPU)


def test_one_idle_target_is_named(settings: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    settings["adapter"]["targets"] = ["attn.to_q", "to_nowhere"]
    Pipeline(parse(settings), CPU)
    assert "to_nowhere match no module" in caplog.text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"path": "/no/such/folder"}, "there is no folder"),
        ({"path": "{tmp}"}, "no model_index.json"),
        ({"height": 33}, r"model.height=33 is no multiple of 4.*32 or 36"),
    ],
)
def test_model_mistakes_are_found_without_weights(
    settings: dict[str, Any], tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    settings["model"] |= {k: v.format(tmp=tmp_path) if isinstance(v, str) else v for k, v in change.items()}
    with pytest.raises(UserError, match=message):
        check(parse(settings))


def test_a_missing_part_of_a_folder_is_named(settings: dict[str, Any], mini: Path, tmp_path: Path) -> None:
    import shutil

    shutil.copytree(mini, tmp_path / "copy")
    shutil.rmtree(tmp_path / "copy" / "scheduler")
    settings["model"]["path"] = str(tmp_path / "copy")
    with pytest.raises(UserError, match="incomplete: scheduler missing"):
        check(parse(settings))


def test_pixels_that_are_not_finite_stop_the_run(config: Config) -> None:
    from vgrpo.errors import RunError

    policy = Pipeline(config, CPU)
    with pytest.raises(RunError, match="VAE decoder"):
        policy.decode(torch.full((1, *policy.latent_shape), float("nan")))


def test_evaluations_may_have_a_sampler_of_their_own(settings: dict[str, Any], mini: Path) -> None:
    settings["evaluation"] |= {"steps": 7, "sampler": "euler"}
    settings["rollout"]["sampler"] = "dpmpp"
    config = parse(settings)
    policy = Pipeline(config, CPU)
    cond = policy.encode(PROMPTS)
    rollout = policy.sample(policy.noise([11, 12]), cond)
    with policy.evaluating():
        mine = policy.sample(policy.noise([11, 12]), cond)
        assert len(policy.schedule()) == 7
    assert torch.equal(policy.sample(policy.noise([11, 12]), cond), rollout)
    settings["rollout"] |= {"steps": 7, "sampler": "pipeline"}  # whose own is Euler
    theirs = call(stock(mini), parse(settings), [11, 12], output_type="latent")
    torch.testing.assert_close(mine, torch.as_tensor(theirs), rtol=0, atol=1e-5)
    assert (mine - rollout).abs().max() > 1e-3
