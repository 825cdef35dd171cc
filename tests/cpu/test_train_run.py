"""Training runs: they learn, go on where they were ended, and leave a drafter that loads."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from surefoot import SurefootError
from surefoot.cli import training
from surefoot.cli.main import app
from surefoot.kernels.torch_backend import TorchBackend
from surefoot.models.decoder import Decoder
from surefoot.speculation.drafting.checkpoints import interface
from surefoot.speculation.proposers.eagle3.checkpoint import open_checkpoint
from surefoot.speculation.proposers.eagle3.config import read_config
from surefoot.speculation.proposers.eagle3.drafter import Eagle3Drafter
from surefoot.train.corpus import Corpus
from surefoot.train.curves import Curves
from surefoot.train.eagle3.options import Eagle3TrainOptions
from surefoot.train.eagle3.recipe import Eagle3Recipe
from surefoot.train.meter import Meter
from surefoot.train.parallel import Workers
from surefoot.train.run import EngineCheck, Trained, speeds
from surefoot.train.shards import SETTINGS
from surefoot.train.target import Target
from test_train_eagle3 import STEPS, chain
from tiny_models import tiny_hf_model, tiny_weights
from train_harness import (
    DOCUMENTS,
    SHORT,
    check_work,
    recipe_of,
    tiny_target,
    trainer_of,
    write_documents,
)


def test_it_learns_64_sequences_by_heart(tmp_path: Path) -> None:
    recipe = recipe_of(
        tmp_path / "data", [(2, 4)] * 65, draft_vocab=48, unroll=1, steps=150,
        step_tokens=2048, batch_tokens=2048, learning_rate=1e-2, measure_every=10**9,
    )  # fmt: skip
    outcome = trainer_of(recipe, tmp_path / "run").run()
    documents, _ = recipe.corpus.split(1, 0)
    batch = recipe.corpus.batch(documents.tolist(), "cpu")
    drafted, rows = recipe.draft(batch), batch.pairs.nonzero()[0]
    right = (drafted.tokens[rows, 0] == drafted.best[rows + 1]).mean()
    assert len(documents) == 64 and outcome.complete
    assert right > 0.95
    lines = (tmp_path / "run" / "curves.jsonl").read_text().splitlines()
    losses = [json.loads(line)["loss"] for line in lines if "loss" in json.loads(line)]
    assert losses[-1] < losses[0]


def test_a_run_that_was_ended_goes_on_to_the_same_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("surefoot.train.trainer._LOG_EVERY", 2)
    whole = recipe_of(tmp_path / "data", DOCUMENTS, **SHORT)
    trainer_of(whole, tmp_path / "whole").run()
    first = recipe_of(tmp_path / "data", DOCUMENTS, **SHORT)
    assert not trainer_of(first, tmp_path / "parts").run(seconds=0).complete
    second = trainer_of(recipe_of(tmp_path / "data", DOCUMENTS, **SHORT), tmp_path / "parts")
    outcome = second.run()
    assert outcome.complete and second.step == 6
    assert outcome.results["rows"] > 0
    for name, value in second.recipe.network.state_dict().items():
        assert torch.equal(value, whole.network.state_dict()[name]), name
    steps = [json.loads(line)["step"] for line in (tmp_path / "parts/curves.jsonl").open()]
    assert steps == [2, 4, 6, 6], "one line for each entry, and the measurement"


def test_a_run_of_so_many_minutes_ends_with_its_learning_rate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter(range(1000))
    monkeypatch.setattr("surefoot.train.trainer.time.monotonic", lambda: next(clock) / 2)
    monkeypatch.setattr("surefoot.train.trainer._LOG_EVERY", 1)
    options = {**SHORT, "steps": None, "duration": 0.2, "warm_up": 0.25}
    trainer = trainer_of(recipe_of(tmp_path / "data", DOCUMENTS, **options), tmp_path / "run")
    outcome = trainer.run()
    assert outcome.complete and outcome.results and 12 <= outcome.seconds < 15
    lines = [json.loads(line) for line in (tmp_path / "run" / "curves.jsonl").open()]
    rates = [line["learning_rate"] for line in lines if "learning_rate" in line]
    top = rates.index(max(rates))
    assert len(rates) == outcome.steps and 0 < top < len(rates) / 2
    assert rates[:top] == sorted(rates[:top]) and rates[top:] == sorted(rates[top:], reverse=True)
    assert rates[-1] < 0.2 * max(rates)
    with pytest.raises(SurefootError, match="duration"):
        Eagle3TrainOptions(duration=-1.0)
    with pytest.raises(SurefootError, match="steps"):
        Eagle3TrainOptions(duration=1.0, steps=3)
    with pytest.raises(SurefootError, match="one process"):
        trainer_of(trainer.recipe, tmp_path / "two", Workers(0, 2))


@pytest.mark.parametrize("train_head", [False, True])
def test_the_work_of_a_step_is_that_of_its_products(tmp_path: Path, train_head: bool) -> None:
    check_work(recipe_of(tmp_path, DOCUMENTS, **SHORT, train_head=train_head))


def test_speeds_are_in_the_curves_and_the_card(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What part of the device's operations they are is known on a GPU only."""
    monkeypatch.setattr("surefoot.train.trainer._LOG_EVERY", 1)
    recipe = recipe_of(tmp_path / "data", DOCUMENTS, **SHORT)
    trainer_of(recipe, tmp_path / "run").run()
    curves = Curves(tmp_path / "run", 10**9)
    entries = [entry for entry in curves.entries if "tflops" in entry]
    assert len(entries) == 6 and all(entry["tflops"] > 0 for entry in entries)
    assert {entry["share_of_arithmetic"] for entry in entries} == {None}
    assert set(speeds(curves)) == {"tokens_per_s", "tflops"}
    monkeypatch.setattr("surefoot.train.meter.most_operations", lambda device: 1e12)
    meter = Meter(torch.device("cpu"), (recipe.network.work,), 0)
    recipe.network.work.product(10, 1000, True)
    told = meter.speeds(100)
    assert told["share_of_arithmetic"] == told["tflops"] and told["tokens_per_s"]


def test_a_run_begins_with_the_weights_of_a_drafter(tmp_path: Path) -> None:
    options = {"draft_vocab": 30, "unroll": 2, "held_out": 3}
    recipe = recipe_of(tmp_path / "data", DOCUMENTS, **{**SHORT, **options, "learning_rate": 0.02})
    first = trainer_of(recipe, tmp_path / "first").run()
    recipe.export(tmp_path / "drafter")
    given = {**SHORT, **options, "init_from": str(tmp_path / "drafter"), "learning_rate": 1e-9}
    second = recipe_of(tmp_path / "data", DOCUMENTS, **given)
    second.begin_from(str(tmp_path / "drafter"))
    outcome = trainer_of(second, tmp_path / "second").run()
    curves = (tmp_path / "second" / "curves.jsonl").open()
    begun = next(entry for entry in map(json.loads, curves) if "held_out" in entry)
    assert begun["step"] == 0 and begun["held_out"] == first.results
    # Weights that get no better are those that are exported.
    assert outcome.best_step == 0
    # A head of the target's rows may be of other tokens.
    wider = recipe_of(tmp_path / "data", DOCUMENTS, **{**given, "draft_vocab": 48})
    wider.begin_from(str(tmp_path / "drafter"))
    head = tiny_target().head_rows(torch.arange(48))
    assert torch.equal(wider.network.head, head)
    names = [name for name in wider.network.tensors() if name != "lm_head.weight"]
    for name in names:
        assert torch.equal(wider.network.weight(name), recipe.network.weight(name)), name


def test_weights_of_another_drafter_are_refused(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path / "data", DOCUMENTS, captured_layers="1,2,3")
    recipe.export(tmp_path / "drafter")
    other = recipe_of(tmp_path / "data", DOCUMENTS, captured_layers="1,2")
    with pytest.raises(SurefootError, match=r"init_from.*layer_ids = \(1, 2, 3\)"):
        other.begin_from(str(tmp_path / "drafter"))
    trained = recipe_of(tmp_path / "data", DOCUMENTS, train_head=True, captured_layers="1,2,3")
    with torch.no_grad():
        trained.network.head.add_(1.0)
    trained.export(tmp_path / "own")
    with pytest.raises(SurefootError, match="--train-head"):
        recipe.begin_from(str(tmp_path / "own"))
    again = recipe_of(tmp_path / "data", DOCUMENTS, train_head=True, captured_layers="1,2,3")
    again.begin_from(str(tmp_path / "own"))
    assert torch.equal(again.network.head, trained.network.head)
    with pytest.raises(SurefootError, match="init_from"):
        recipe.begin_from(str(tmp_path / "nothing"))


def test_the_best_weights_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scores = iter([2.0, 3.0, 1.0])
    monkeypatch.setattr("surefoot.train.trainer.score", lambda results: next(scores))
    recipe = recipe_of(tmp_path / "data", DOCUMENTS, measure_every=100, **{**SHORT, "steps": 5})
    seen: list[torch.Tensor] = []
    trainer = trainer_of(recipe, tmp_path / "run")
    measured = trainer._measure

    def watched(curves: Any) -> None:
        seen.append(next(iter(recipe.network.parameters())).detach().clone())
        measured(curves)

    monkeypatch.setattr(trainer, "_measure", watched)
    outcome = trainer.run()
    assert len(seen) == 3 and outcome.best_step == 4
    assert torch.equal(next(iter(recipe.network.parameters())), seen[1])


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("vocab", [40, 99])
def test_what_is_exported_drafts_the_same(arch: str, vocab: int, tmp_path: Path) -> None:
    config, weights = tiny_weights(arch, layers=7, rope_theta=5e4)
    decoder = Decoder(config, weights, TorchBackend("cpu", torch.float32))
    target = Target(f"tiny {arch}", decoder, weights)
    corpus = Corpus([write_documents(tmp_path, [(1, 12), (37, 9)])], 64)
    options = Eagle3TrainOptions(draft_vocab=vocab, unroll=STEPS, max_length=64, held_out=1)
    recipe = Eagle3Recipe(options, target, corpus)
    network = recipe.network
    with torch.no_grad():
        for value in network.parameters():
            value.add_(0.1 * torch.randn(value.shape, generator=torch.Generator().manual_seed(3)))
        network.head.copy_(target.head_rows(recipe.host_ids))
    folder = tmp_path / "out"
    recipe.export(folder)
    checkpoint = open_checkpoint(str(folder))
    drafter = Eagle3Drafter(checkpoint, decoder)
    # The loader's reading of the ids is what was trained on: 2, the middle, the last but two.
    assert interface(checkpoint, config).captured_layers == recipe.layers == (2, 3, 4)
    stored = load_file(folder / "model.safetensors")
    members = stored["t2d"].nonzero().flatten()
    assert torch.equal(members, torch.arange(vocab) + stored["d2t"])
    assert ("lm_head.weight" in stored) == (vocab < 99), "a whole head is the target's own"
    assert all(name.startswith("midlayer.") or "." not in name.removesuffix(".weight")
               for name in stored)  # fmt: skip
    batch = corpus.batch([0, 1], "cpu")
    features = target.forward(batch, recipe.layers).features
    with torch.no_grad():
        rows = network.unroll(batch, features, target, STEPS)
    for document, start in ((0, 0), (0, 8), (1, 36)):
        begin, end = (int(batch.starts[document + index]) for index in (0, 1))
        expected = torch.stack([hidden[begin + start] @ network.head.T for hidden in rows])
        found = chain(drafter, batch.ids[begin:end], features[begin:end], start)
        torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-3)


def test_ids_of_captured_layers_are_told_in_both_ways(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path / "data", [(2, 6)] * 3, captured_layers="1,3")
    recipe.export(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    name = "eagle_aux_hidden_state_layer_ids"
    assert config[name] == [1, 3] and config["eagle_config"][name] == [0, 2]
    assert read_config(tmp_path).layers_of(4) == (1, 3)
    # Whoever reads the top of the file alone gets the same.
    config["eagle_config"].pop(name)
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_config(tmp_path).layers_of(4) == (1, 3)


def test_one_command_from_a_model_to_a_served_drafter(tmp_path: Path) -> None:
    model = tiny_hf_model("qwen3", tmp_path, num_hidden_layers=4)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(
        "\n".join(json.dumps({"turns": [f"the {n} cat and the {n * n} dog?"]}) for n in range(40))
    )
    data, out = tmp_path / "data", tmp_path / "out"
    common = ["--target", str(model), "--dtype", "float32", "--threads", "1"]

    def run(*args: str) -> str:
        result = CliRunner().invoke(app, ["train", *args, *common])
        assert result.exit_code == 0, result.output
        return result.output

    made = ["--tokens", "9999", "--max-tokens", "16", "--min-tokens", "4", "--max-prompt", "300"]
    assert "40 documents" in run("data", "--out", str(data), "--prompts", str(prompts), *made)
    recipe = ["--steps", "12", "--step-tokens", "1024", "--batch-tokens", "1024", "--unroll", "3"]
    recipe += ["--draft-vocab", "200", "--data", str(data), "--out", str(out), "--no-certify"]
    run("eagle3", *recipe)
    facts = json.loads((out / "training" / "facts.json").read_text())
    assert facts["results"]["on_policy"]["greedy"] >= 0.99
    engine = facts["engine"]
    assert engine["length"] == pytest.approx(engine["offline"], rel=0.03)
    card = (out / "README.md").read_text()
    assert f"{engine['length']:.2f}" in card and "Not certified yet." in card
    before = (out / "model.safetensors").read_bytes()
    (out / "model.safetensors").unlink()
    run("eagle3", *recipe)
    assert (out / "model.safetensors").read_bytes() == before, "a finished run is exported again"
    spark = [*recipe[:6], "--block", "4", "--markov-rank", "8", "--layers", "1"]
    run("dspark", *spark, "--data", str(data), "--out", str(tmp_path / "spark"), "--no-certify")
    engine = json.loads((tmp_path / "spark" / "training" / "facts.json").read_text())["engine"]
    assert engine["length"] == pytest.approx(engine["offline"], rel=0.03)
    refused = CliRunner().invoke(app, ["train", "eagle3", *recipe, *common, "--seed", "1"])
    assert refused.exit_code == 2 and "seed = 0, not 1" in refused.output


@pytest.mark.parametrize(("code", "told"), [(0, "PASS"), (1, "FAIL"), (2, "INCONCLUSIVE")])
def test_the_certificate_is_in_the_card(
    code: int, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from surefoot.train.measure import Measurement

    results = Measurement(2).results()
    facts = {"label": "EAGLE-3", "target": "t", "proposer": "eagle3", "held_out": 1, "depth": 2}
    facts |= {"results": results, "trained": {"steps": 3}, "successors": None}
    (tmp_path / "training").mkdir()
    asked: list[Any] = []

    def issue(engine: Any, *rest: Any) -> int:
        asked.append(engine)
        return code

    monkeypatch.setattr("surefoot.cli.certifying.issue", issue)
    monkeypatch.setattr(
        "surefoot.train.run.train",
        lambda *_: Trained(True, facts, EngineCheck([[1]], [1], 2, 1.5)),
    )
    monkeypatch.setattr("surefoot.train.measure.engine_length", lambda *_: 1.9)
    options = Eagle3TrainOptions()
    where = ([tmp_path], tmp_path)
    if code == 1:
        import typer

        with pytest.raises(typer.Exit):
            training.train_drafter("eagle3", {"model": "t"}, options, *where, True, True, 9.0)
    else:
        training.train_drafter("eagle3", {"model": "t"}, options, *where, True, True, 9.0)
    assert asked[0]["proposers"] == (f"eagle3={tmp_path}",)
    card = (tmp_path / "README.md").read_text()
    assert f"`surefoot certify --quick`: {told}" in card and "| 1.90 |" in card


def test_data_of_another_model_is_refused(tmp_path: Path) -> None:
    from surefoot.train.run import _data_facts

    with pytest.raises(SurefootError, match="no folder of token shards"):
        _data_facts(tmp_path, tiny_target())
    (tmp_path / SETTINGS).write_text(json.dumps({"vocab_size": 7, "target": "other"}))
    with pytest.raises(SurefootError, match="7 tokens"):
        _data_facts(tmp_path, tiny_target())


def test_two_processes_make_the_weights_of_one(tmp_path: Path) -> None:
    script = tmp_path / "worker.py"
    script.write_text(
        "import sys; from pathlib import Path\n"
        f"sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "import torch; from train_harness import *\n"
        "from surefoot.train.parallel import workers\n"
        f"folder = Path({str(tmp_path)!r})\n"
        "with workers('cpu') as own:\n"
        "    recipe = recipe_of(folder / f'data{own.rank}', DOCUMENTS, **SHORT)\n"
        "    trainer_of(recipe, folder / 'run', own).run()\n"
        "    torch.save(recipe.network.state_dict(), folder / f'{own.rank}.pt')\n"
    )
    single = recipe_of(tmp_path / "data", DOCUMENTS, **SHORT)
    trainer_of(single, tmp_path / "single").run()
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
    processes = [
        subprocess.Popen(
            [sys.executable, str(script)],
            env={**os.environ, **place, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(2)
    ]
    assert [process.wait(timeout=120) for process in processes] == [0, 0]
    for name, value in single.network.state_dict().items():
        for rank in range(2):
            other = torch.load(tmp_path / f"{rank}.pt")[name]
            torch.testing.assert_close(other, value, atol=2e-5, rtol=1e-4)
    with pytest.raises(SurefootError, match="3 processes cannot share"):
        trainer_of(single, tmp_path / "three", Workers(0, 3))


def _free_port() -> int:
    import socket

    with socket.socket() as own:
        own.bind(("127.0.0.1", 0))
        return own.getsockname()[1]


@pytest.mark.parametrize(
    ("verb", "wrong", "message"),
    [
        (["data"], ["--target", "/nowhere"], "--target: there is no model '/nowhere'"),
        (["data"], ["--tokens", "0"], "--tokens: 0 is below 1"),
        (["eagle3", "--data", "/nowhere"], [], "--data: /nowhere holds no shards"),
    ],
)
def test_mistakes_name_their_option(
    verb: list[str], wrong: list[str], message: str, tmp_path: Path
) -> None:
    line = ["train", *verb, "--out", str(tmp_path / "out"), *wrong]
    refused = CliRunner().invoke(app, line)
    assert refused.exit_code == 2 and message in refused.output
