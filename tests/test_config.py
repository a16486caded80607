"""Settings: every mistake at once, in the user's words, before anything is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from vgrpo.cli import main
from vgrpo.config import load_recipe, parse, parse_overrides, put, recipes
from vgrpo.errors import UserError


@pytest.mark.parametrize("name", recipes())
def test_every_recipe_loads_and_survives_a_round_trip(name: str) -> None:
    config = load_recipe(name)
    assert parse(config.dump()) == config


def test_overrides_win_over_the_recipe() -> None:
    config = load_recipe("tiny", **{"run.steps": 7, "objective.draws": 2})
    assert (config.run.steps, config.objective.draws) == (7, 2)
    assert parse_overrides(["optimizer.lr=1e-4", "run.trackers=[tensorboard]", "model.path=a=b"]) == {
        "optimizer.lr": "1e-4",
        "run.trackers": ["tensorboard"],
        "model.path": "a=b",
    }
    assert load_recipe("tiny", **parse_overrides(["optimizer.lr=1e-4"])).optimizer.lr == 1e-4


def test_derived_numbers() -> None:
    config = load_recipe(
        "tiny",
        **{"prompts.per_step": 6, "rollout.group_size": 3, "update.per_rollout": 2, "update.passes": 3, "run.steps": 5},
    )
    assert config.images_per_step == 18
    assert config.updates == 30


def test_controls_that_cannot_act_are_named() -> None:
    both = {"update.per_rollout": 1, "update.passes": 1, "objective.clip": 0.01, "objective.kl_weight": 0.3}
    assert [note.split(":")[0] for note in load_recipe("tiny", **both).inactive()] == [
        "objective.clip",
        "objective.kl_weight",
    ]
    assert load_recipe("tiny", **(both | {"update.passes": 2})).inactive() == []


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("rollout.grup_size", 4, "rollout.grup_size: no such setting, did you mean 'group_size'"),
        ("rollout.group-size", 4, "did you mean 'group_size'"),
        ("objective.group_size", 4, "did you mean 'rollout.group_size'"),
        ("rollout.num_generations", 4, "did you mean 'rollout.group_size'"),
        ("learning_rate", 1e-3, "did you mean 'optimizer.lr'"),
        ("rollout.group_size", 1, "rollout.group_size: .*greater than or equal to 2, got 1"),
        ("rollout.group_size", 0, "greater than or equal to 2, got 0"),
        ("rollout.group_size", -4, "greater than or equal to 2, got -4"),
        ("rollout.group_size", 2.5, "got 2.5"),
        ("rollout.group_size", "four", "got 'four'"),
        ("rollout.sampler", "dpm", "'dpmpp'"),
        ("optimizer.lr", "fast", "optimizer.lr: .*got 'fast'"),
        ("update.per_rollout", 5, "update.per_rollout=5 must divide prompts.per_step=32"),
        ("objective.draws", 20, "objective.draws=20 strata need a schedule"),
        ("rewards.scene", {"kind": "shape"}, "shapes"),
        ("rewards.scene.mod", "strict", "rewards.scene.mod: no such setting, did you mean 'mode'"),
        ("evaluation.main", "other", "evaluation.main='other'"),
        ("run.steps", None, "run.steps"),
    ],
)
def test_one_mistake_one_message(key: str, value: Any, words: str) -> None:
    with pytest.raises(UserError, match=words) as caught:
        load_recipe("tiny", **{key: value})
    assert str(caught.value).startswith("the settings have a mistake:")


def test_all_mistakes_at_once() -> None:
    wrong = {
        "rollout.x": 1,
        "modell": 2,
        "update.y": 3,
        "optimizer.lr": -1,
        "rollout.group_size": 1,
        "rewards.scene.z": 4,
    }
    with pytest.raises(UserError) as caught:
        load_recipe("tiny", **wrong)
    message = str(caught.value)
    assert message.startswith("the settings have 6 mistakes")
    assert all(key in message for key in wrong)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "must hold sections"),
        ("model: [", "is not YAML"),
        ("- a\n- b\n", "must hold sections"),
        ("model:\n path: x\n  y: 1\n", "is not YAML"),
    ],
)
def test_files_that_are_no_recipe(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "r.yaml").write_text(text)
    with pytest.raises(UserError, match=words):
        load_recipe(tmp_path / "r.yaml")


def test_unknown_recipe_names_the_nearest() -> None:
    with pytest.raises(UserError, match="did you mean 'tiny'"):
        load_recipe("tinny")
    with pytest.raises(UserError, match="no recipe file"):
        load_recipe("nowhere.yaml")


def test_a_value_is_no_section() -> None:
    with pytest.raises(UserError, match="steps is a value"):
        put({"run": {"steps": 3}}, "run.steps.more", 1)


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["train", "tiny", "rollout.grup_size=4"], 2, "did you mean 'group_size'"),
        (["train", "tiny", "rollout.group_size=1"], 2, "greater than or equal to 2"),
        (["train", "tiny", "nonsense"], 2, "expected key.path=value"),
        (["train", "tiny", "model.path=/no/such/folder"], 2, "there is no folder"),
        (["train", "tiny", "prompts.train=/no/file.txt"], 2, "/no/file.txt"),
        (["train"], 2, "which recipe"),
        (["train", "--resume", "/no/run"], 2, "no run folder"),
        (["eval", "/no/run"], 2, "no run folder"),
        (["train", "tiny", "run.folder=/dev/null/runs"], 2, "cannot write"),
    ],
)
def test_command_line_mistakes(
    arguments: list[str], code: int, words: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(
            [
                *arguments,
                *(
                    [f"run.folder={tmp_path}"]
                    if arguments[:2] == ["train", "tiny"] and "run.folder" not in arguments[-1]
                    else []
                ),
            ]
        )
    assert caught.value.code == code
    err = capsys.readouterr().err
    assert words in err
    assert "Traceback" not in err


def test_an_empty_prompt_file_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty.txt").write_text("\n\n")
    with pytest.raises(SystemExit) as caught:
        main(["train", "tiny", f"prompts.train={tmp_path / 'empty.txt'}", f"run.folder={tmp_path / 'runs'}"])
    assert caught.value.code == 2
    assert "has no prompts" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_the_command_line_lists_recipes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["recipes"])
    assert caught.value.code == 0
    assert capsys.readouterr().out.split() == recipes()


def test_the_readme_leads_to_the_line_of_the_ratio() -> None:
    import re

    root, wanted = Path(__file__).parents[1], "ratio = torch.exp(precise(log_ratio))"
    found = re.search(rf"\[`{re.escape(wanted)}`\]\((\S+)#L(\d+)\)", (root / "README.md").read_text())
    assert found
    assert (root / found[1]).read_text().splitlines()[int(found[2]) - 1].strip() == wanted
