"""Every model family against its own stock pipeline, built from config with random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline

from vgrpo.config import Config, parse
from vgrpo.errors import UserError
from vgrpo.objectives.policy_gradient import DDPO, DanceGRPO, FlowGRPO
from vgrpo.policies.pipeline import Pipeline, check
from vgrpo.testing import MINIS, build_mini
from vgrpo.training import train
from vgrpo.types import Prompt

PROMPTS = [Prompt(text="a red fox", id="1"), Prompt(text="two green cups", id="2")]
CPU = torch.device("cpu")
VP = ("sd15", "sd21")


@pytest.fixture(scope="module")
def minis(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {family: build_mini(family, tmp_path_factory.mktemp("families") / family) for family in MINIS}


@pytest.fixture(params=MINIS)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


def settings_for(settings: dict[str, Any], minis: dict[str, Path], family: str, **rollout: Any) -> dict[str, Any]:
    settings["model"]["path"] = str(minis[family])
    settings["rollout"] |= rollout
    return settings


def stock(folder: Path) -> Any:
    pipe = DiffusionPipeline.from_pretrained(folder, local_files_only=True)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def call(pipe: Any, config: Config, seeds: list[int], **extra: Any) -> Any:
    lengths = {} if hasattr(pipe, "unet") else {"max_sequence_length": config.model.max_sequence_length}
    out = pipe(
        prompt=[p.text for p in PROMPTS],
        generator=[torch.Generator().manual_seed(s) for s in seeds],
        num_inference_steps=config.rollout.steps,
        guidance_scale=config.rollout.guidance,
        height=config.model.height,
        width=config.model.width,
        **lengths,
        **{"output_type": "np", **extra},
    )
    return out.images


def shaken(policy: Pipeline) -> Pipeline:
    """LoRA starts as the identity; random weights make it visible."""
    generator = torch.Generator().manual_seed(7)
    policy.load({name: 0.3 * torch.randn(p.shape, generator=generator) for name, p in policy.trainable.items()})
    return policy


@pytest.mark.parametrize("guidance", [1.0, 3.5])
def test_rollout_equals_the_stock_call(
    settings: dict[str, Any], minis: dict[str, Path], family: str, guidance: float
) -> None:
    if family == "flux1-schnell" and guidance > 1:
        pytest.skip("has no guidance")
    config = parse(settings_for(settings, minis, family, guidance=guidance))
    policy = Pipeline(config, CPU)
    x0 = policy.sample(policy.noise([11, 12]), policy.encode(PROMPTS))
    assert x0.shape == (2, *policy.latent_shape)
    ours = policy.decode(x0).permute(0, 2, 3, 1).float() / 255
    theirs = call(stock(minis[family]), config, [11, 12])
    assert np.ptp(theirs) > 0.1  # a picture, not a constant
    np.testing.assert_allclose(ours.numpy(), theirs, atol=0.5 / 255 + 1e-4)
    doubled = guidance > 1 and family in ("sd3", *VP)  # FLUX takes guidance as an input
    assert policy.calls == 2 * config.rollout.steps * (2 if doubled else 1)


@pytest.mark.parametrize("guidance", [1.0, 3.5])
def test_predict_is_one_call_of_the_network_in_the_pipeline(
    settings: dict[str, Any], minis: dict[str, Path], family: str, guidance: float
) -> None:
    """Everything that the network was given and gave in the stock loop, against `guided` at the schedule's times."""
    if family == "flux1-schnell" and guidance > 1:
        pytest.skip("has no guidance")
    config = parse(settings_for(settings, minis, family, guidance=guidance))
    policy = shaken(Pipeline(config, CPU))
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    stepped = policy.pipe.scheduler.step

    def step(model_output: torch.Tensor, timestep: Any, sample: torch.Tensor, **rest: Any) -> Any:
        seen.append((sample.clone(), model_output.clone()))
        return stepped(model_output, timestep, sample, **rest)

    policy.pipe.scheduler.step = step
    cond = policy.encode(PROMPTS)
    policy.sample(policy.noise([1, 2]), cond)
    schedule = policy.schedule()
    assert len(seen) == len(schedule) == config.rollout.steps
    shape = policy.latent_shape
    for t, (x, out) in zip(schedule, seen, strict=True):
        x_t, expected = policy.family.unpack(x, shape), policy.family.unpack(out, shape)
        with torch.no_grad():
            mine = policy.guided(x_t, t.expand(2), cond)
        torch.testing.assert_close(mine, expected, rtol=0, atol=1e-5)
        x0, eps = policy.path.split(x_t, t, mine)
        torch.testing.assert_close(policy.path.noisy(x0, eps, t), x_t, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("sampler", ["pipeline", "dpmpp", "unipc"])
def test_schedule_is_the_scheduler_s_own(
    settings: dict[str, Any], minis: dict[str, Path], family: str, sampler: str
) -> None:
    config = parse(settings_for(settings, minis, family, sampler=sampler))
    if (family, sampler) == (
        "flux1-schnell",
        "dpmpp",
    ):  # the pipeline gives mu, which it takes with a dynamic shift only
        with pytest.raises(UserError, match="rollout.sampler=dpmpp is not for this model.*use pipeline, euler, unipc"):
            Pipeline(config, CPU)
        return
    policy = Pipeline(config, CPU)
    policy.sample(policy.noise([1, 2]), policy.encode(PROMPTS))
    scheduler, schedule = policy.pipe.scheduler, policy.schedule()
    if family in VP:
        alphas = scheduler.alphas_cumprod[scheduler.timesteps]
        torch.testing.assert_close(policy.path.alpha_bar(schedule), alphas, rtol=0, atol=0)
    else:
        torch.testing.assert_close(schedule, scheduler.sigmas[scheduler.sigmas > 0], rtol=0, atol=0)
    assert (schedule.diff() < 0).all() and schedule[0] <= 1 and schedule[-1] > 0


def test_exported_adapter_draws_the_same_picture_twice_under_two_names(
    settings: dict[str, Any], minis: dict[str, Path], tmp_path: Path, family: str
) -> None:
    settings["adapter"] |= {"rank": 2, "alpha": 5}
    config = parse(settings_for(settings, minis, family))
    policy = shaken(Pipeline(config, CPU))
    policy.export(tmp_path / "adapter")
    mine = policy.sample(policy.noise([5, 6]), policy.encode(PROMPTS))
    pipe = stock(minis[family])
    base = call(pipe, config, [5, 6], output_type="latent")
    for name in ("one", "two"):
        pipe.load_lora_weights(tmp_path / "adapter", adapter_name=name)
        pipe.set_adapters([name])
        theirs = policy.family.unpack(torch.as_tensor(call(pipe, config, [5, 6], output_type="latent")), mine.shape[1:])
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)
    assert (policy.family.unpack(torch.as_tensor(base), mine.shape[1:]) - mine).abs().max() > 1e-2


def test_full_fine_tuning_saves_a_pipeline_that_loads(
    settings: dict[str, Any], minis: dict[str, Path], tmp_path: Path, family: str
) -> None:
    settings["adapter"] = {"kind": "full"}
    config = parse(settings_for(settings, minis, family))
    policy = Pipeline(config, CPU)
    with torch.no_grad():
        for p in policy.trainable.values():
            p.mul_(1.05)
    policy.export(tmp_path / "tuned")
    mine = policy.sample(policy.noise([5, 6]), policy.encode(PROMPTS))
    theirs = torch.as_tensor(call(stock(tmp_path / "tuned"), config, [5, 6], output_type="latent"))
    torch.testing.assert_close(mine, policy.family.unpack(theirs, mine.shape[1:]), rtol=1e-5, atol=1e-5)


def test_two_updates_raise_a_brightness_reward_from_a_ratio_of_one(
    settings: dict[str, Any], minis: dict[str, Path], family: str
) -> None:
    settings = settings_for(settings, minis, family, group_size=8, micro_batch=5)
    settings["update"] = {"micro_batch": 7, "per_rollout": 2}
    settings["optimizer"] = {"lr": 0.02}
    settings["run"] |= {"steps": 6}
    settings["evaluation"] |= {"images_per_prompt": 8}
    run = train(parse(settings))
    first, last = run.evaluations()[0], run.evaluations()[-1]
    assert last["scores"]["brightness"] > first["scores"]["brightness"]
    assert all(row["ratio/first"] < 1e-5 for row in run.metrics())


WALKS = {"flow": FlowGRPO(), "dance": DanceGRPO(), "cps": FlowGRPO(noise="cps"), "ddim": DDPO()}


@pytest.mark.parametrize("noise", WALKS)
def test_a_walk_without_noise_is_the_stock_picture(
    settings: dict[str, Any], minis: dict[str, Path], family: str, noise: str
) -> None:
    if (family in VP) != (noise == "ddim"):
        pytest.skip("another path")
    config = parse(settings_for(settings, minis, family))
    policy = Pipeline(config, CPU)
    objective = WALKS[noise].model_copy(update={"level": 0.0})
    start, cond = policy.noise([3, 4]), policy.encode(PROMPTS)
    rows = [(0, 0, slot, 0) for slot in range(2)]
    # with no noise there is no density, which only the records need
    import vgrpo.objectives.policy_gradient as module

    density, module.log_density = module.log_density, lambda x, mean, std: torch.zeros(len(x))
    try:
        mine, _ = objective.sample(policy, policy.schedule(), start, cond, rows, group_size=1, step=0)
    finally:
        module.log_density = density
    theirs = policy.sample(start, cond)
    # diffusers ends DDIM at the first ᾱ where `set_alpha_to_one` is off, as in SD 1.5; a walk ends at clean data
    tolerance = 2e-2 if family in VP else 1e-5
    torch.testing.assert_close(mine, theirs, rtol=0, atol=tolerance * theirs.abs().max().item())


def test_families_and_objectives_that_do_not_fit_are_named(settings: dict[str, Any], minis: dict[str, Path]) -> None:
    settings["objective"] = {"name": "ddpo"}
    with pytest.raises(UserError, match="objective.name=ddpo is for models of a variance-preserving path"):
        check(parse(settings_for(settings, minis, "flux1-dev")))
    settings["objective"] = {"name": "flow_grpo"}
    with pytest.raises(UserError, match="objective.name=flow_grpo is for models of a linear path"):
        check(parse(settings_for(settings, minis, "sd15")))
    settings["objective"] = {"name": "vgrpo", "draws": 2}
    with pytest.raises(UserError, match="rollout.sampler=heun is not for this model, of a variance-preserving path"):
        Pipeline(parse(settings_for(settings, minis, "sd15", sampler="heun")), CPU)
    with pytest.raises(UserError, match="rollout.guidance=2.*without guidance"):
        Pipeline(parse(settings_for(settings, minis, "flux1-schnell", sampler="pipeline", guidance=2.0)), CPU)


def test_ddpo_on_a_real_unet(settings: dict[str, Any], minis: dict[str, Path]) -> None:
    settings = settings_for(settings, minis, "sd15", steps=5)
    settings["objective"] = {"name": "ddpo"}
    settings["update"] |= {"per_rollout": 2}
    rows = train(parse(settings)).metrics()
    assert all(row["ratio/first"] < 1e-5 and row["weight_change"] > 0 for row in rows)
    assert rows[0]["calls/update"] == 16 * 4  # the last of five steps has no noise


def test_training_goes_on_from_an_adapter_and_its_start_is_that_adapter(
    settings: dict[str, Any], minis: dict[str, Path], tmp_path: Path, family: str
) -> None:
    settings = settings_for(settings, minis, family)
    first = shaken(Pipeline(parse(settings), CPU))
    first.export(tmp_path / "adapter")
    settings["adapter"]["start"] = str(tmp_path / "adapter")
    second = Pipeline(parse(settings), CPU)
    for name, weight in first.trainable.items():
        torch.testing.assert_close(second.trainable[name], weight, rtol=0, atol=0)
    settings["objective"] = {"name": "nft", "draws": 2, "kl_start": 0.5}
    rows = train(parse(settings)).metrics()
    assert (
        rows[0]["kl_start"] == 0 < rows[1]["kl_start"]
    )  # to the base model it would be large in the first step already
    for changes, words in (
        ({"rank": 2}, "adapter.rank=2, but .* has 4; set adapter.rank=4"),
        ({"alpha": 3}, "adapter.alpha=3, but .* has 16"),
        ({"targets": ["to_q"]}, "other modules"),
        ({"start": "/no/such"}, "no file or folder"),
    ):
        with pytest.raises(UserError, match=words):
            Pipeline(parse(settings | {"adapter": settings["adapter"] | changes}), CPU)
