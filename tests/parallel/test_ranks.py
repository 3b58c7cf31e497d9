"""Several ranks give the bits of one, however the work is divided."""

import subprocess
import sys

import numpy as np
import pytest

from scratchformer.data import SegmentBatch, Subwords, TextBatches
from scratchformer.generation import translate, translation
from scratchformer.models import EncoderDecoder, LanguageModel, TransformerXL
from scratchformer.optim import AdamW, Constant, Group, Muon
from scratchformer.parallel.ranks import Elsewhere, Ranks
from scratchformer.parallel.replicas import TreeSum, slices_of
from scratchformer.rng import Key
from scratchformer.training import Diverged, Replicas, evaluate_language_model, load_snapshot

from ..training.visible_loop import train
from .ranks_in_threads import run_ranks
from .test_sums import tree

TEXT = Key(0).generator().integers(0, 29, 3000, dtype=np.uint8)


def trained(ranks, out, steps=4, count=1, shard=False, resume=False, groups=(), optimizer=AdamW, **options):
    """Train a model of several pieces of parameters, with dropout; returns its parameters and its scores."""
    model = LanguageModel(29, d_model=96, heads=2, depth=2, context=8, dropout=0.1, key=Key(1))
    with Replicas(model, count, micro_batch=2, ranks=ranks, **options) as replicas:
        state = train(
            replicas,
            optimizer(model.parameters(), 0.01, groups=groups),
            Constant(0.01),
            TextBatches(TEXT, 10, 8, Key(2)),  # 5 micro-batches
            steps,
            out,
            evaluate=lambda: evaluate_language_model(replicas, TEXT[:200]),
            snapshot_every=3,
            log_every=1,
            clip=0.5,
            resume=resume,
            shard=shard,
        )
    return model.flat.data, state


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    out = tmp_path_factory.mktemp("alone") / "run"
    return out, *trained(None, out)


def same_snapshot(one, other):
    one, other = load_snapshot(one), load_snapshot(other)
    assert one.optimizer.keys() == other.optimizer.keys()
    expected = set() if one.path.name == "best.safetensors" else {"steps", "parameters", "m", "v"}
    assert one.optimizer.keys() - {"matrices"} == expected
    for a, b in (one.model, other.model), (one.optimizer, other.optimizer):
        for name in a:
            np.testing.assert_array_equal(a[name], b[name])
    assert one.state == other.state


@pytest.mark.parametrize("shard", [False, True])
@pytest.mark.parametrize(("size", "count"), [(1, 2), (2, 1), (2, 2), (3, 1), (4, 2), (5, 1)])
def test_any_number_of_ranks_gives_the_same_bits(alone, tmp_path, size, count, shard):
    out, expected, state = alone
    for found, own_state in run_ranks(size, lambda ranks: trained(ranks, tmp_path / "run", count=count, shard=shard)):
        np.testing.assert_array_equal(found, expected)
        assert own_state["best"] == state["best"]
    same_snapshot(out, tmp_path / "run")
    lines = [(run / "metrics.jsonl").read_text().splitlines() for run in (out, tmp_path / "run")]
    assert len(lines[0]) == len(lines[1]) == 5  # of rank 0 alone


@pytest.mark.parametrize(("before", "after"), [(4, 1), (1, 3), (3, 2)])
@pytest.mark.parametrize("precision", ["float32", "float16"])
def test_a_run_goes_on_with_another_number_of_ranks(tmp_path, before, after, precision):
    trained(None, tmp_path / "whole", precision=precision)
    for size, steps in (before, 2), (after, 4):
        run_ranks(
            size,
            lambda ranks, steps=steps: trained(
                ranks, tmp_path / "parts", steps, shard=True, resume=steps > 2, precision=precision
            ),
        )
    for name in "", "best.safetensors":
        same_snapshot(tmp_path / "whole" / name, tmp_path / "parts" / name)


def test_a_sharded_optimizer_of_some_parameters(tmp_path):
    """Frozen parameters lie between those that are stepped, and there are several learning rates."""
    groups = [Group("body.blocks.0.*", frozen=True), Group("*.w", lr=0.001)]
    expected, _ = trained(None, tmp_path / "alone", groups=groups)
    for found, _ in run_ranks(3, lambda ranks: trained(ranks, tmp_path / "run", shard=True, groups=groups)):
        np.testing.assert_array_equal(found, expected)
    same_snapshot(tmp_path / "alone", tmp_path / "run")


@pytest.mark.parametrize(("size", "count"), [(1, 2), (3, 1), (5, 2)])
def test_muons_matrices_are_not_cut(tmp_path, size, count):
    """The largest have more numbers than a piece of the flat arrays, or than a rank's share of them."""
    out = tmp_path / "alone"
    expected, _ = trained(None, out, optimizer=Muon)
    options = dict(count=count, shard=True, optimizer=Muon)
    for steps in 2, 4:
        for found, _ in run_ranks(
            size, lambda ranks, steps=steps: trained(ranks, tmp_path / "run", steps, resume=steps > 2, **options)
        ):
            assert steps == 2 or np.array_equal(found, expected)
    same_snapshot(out, tmp_path / "run")


def test_what_a_model_remembers_is_the_same_in_all_ranks():
    memory = np.random.default_rng(0).standard_normal((10, 2, 8, 24)).astype(np.float32)
    ids = Key(4).generator().integers(0, 29, (10, 8), dtype=np.int32)

    def remembered(ranks):
        found = []
        model = TransformerXL(29, d_model=24, heads=2, depth=2, context=8, memory=8, key=Key(1))
        Replicas(model, 2, 3, ranks=ranks).gradients(SegmentBatch(ids, ids, memory), Key(0), found.extend)
        return np.concatenate(found)

    (expected,) = run_ranks(1, remembered)
    for found in run_ranks(3, remembered):
        np.testing.assert_array_equal(found, expected)


def test_a_run_that_diverges_is_reported_by_rank_0(tmp_path, monkeypatch):
    loss = LanguageModel.loss
    monkeypatch.setattr(LanguageModel, "loss", lambda *inputs, **options: (loss(*inputs, **options)[0] * np.nan, None))
    monkeypatch.setattr(LanguageModel, "loss_backward", lambda *inputs: None)
    ended = []

    def run(ranks):
        try:
            trained(ranks, tmp_path / "run")
        except Elsewhere:
            ended.append(ranks.rank)

    with pytest.raises(Diverged, match="step 1: loss nan"):
        run_ranks(3, run)
    assert sorted(ended) == [1, 2]


def test_what_is_sent_and_what_is_kept(tmp_path):
    """Two ranks, of 2 of 4 shares each: half the gradient and half the parameters or the gradient; half the means.

    In half precision the parameters are sent in it, and all of them in float32 only when they are wanted whole.
    """
    P = LanguageModel(29, d_model=96, heads=2, depth=2, context=8).flat.data.size
    kept = {}

    def step(ranks, shard, precision="float32"):
        model = LanguageModel(29, d_model=96, heads=2, depth=2, context=8, key=Key(1))
        optimizer = AdamW(model.parameters(), 0.01)
        replicas = Replicas(model, 1, 2, precision, ranks)
        if shard:
            replicas.shard(optimizer)
        replicas.gradients(TextBatches(TEXT, 8, 8, Key(2)).batch(0), Key(3))
        optimizer.step()
        replicas.join()
        kept[shard, ranks.rank] = optimizer.m.size
        sent = ranks.comm.sent
        if precision == "float16":
            replicas.join_whole()
            np.testing.assert_array_equal(replicas.half, model.flat.data.astype(np.float16))
            assert ranks.comm.sent - sent == 4 * kept[shard, ranks.rank]
        return sent

    for shard in False, True:
        assert sum(run_ranks(2, lambda ranks, shard=shard: step(ranks, shard))) == 2 * P * 4
    assert sum(run_ranks(2, lambda ranks: step(ranks, True, "float16"))) == P * 4 + P * 2
    assert kept[False, 0] == kept[False, 1] == P == kept[True, 0] + kept[True, 1]
    assert 0 < kept[True, 0] < P


@pytest.mark.parametrize(("size", "count"), [(2, 8), (3, 8), (4, 8), (8, 8), (3, 2)])
def test_slices_of_unequal_length_are_summed(size, count):
    """What is received is put where terms were; with 8 ranks they wait there. Of two terms, one of 3 ranks has none."""
    terms = np.random.default_rng(0).standard_normal((count, 200_003)).astype(np.float32)

    def summed(ranks):
        grad, sums, own = np.empty_like(terms[0]), TreeSum(count, []), ranks.part(count)
        slices = slices_of(grad, size)
        for place in own:
            grad[...] = terms[place]
            sums.add(place, grad, copy=place + 1 < own.stop)
        ranks.sum(sums, ranks.gather(sorted(sums.waiting)), grad, slices)
        ranks.join(grad, slices)
        return grad

    for found in run_ranks(size, summed):
        np.testing.assert_array_equal(found, tree(terms))


def test_translations_are_shared_out_and_the_same(monkeypatch):
    """Every batch is translated once, by one of the ranks, and all ranks get all translations."""
    subwords = Subwords.bpe(["the man eats a red apple", "der Mann isst einen roten Apfel"] * 3, 60)
    model = EncoderDecoder(len(subwords), 8, 2, 1, key=Key(3)).to(dtype=np.float64)
    sentences = ["the man eats a red apple", "a man", "red red red apple eats the man", "apple", "the man a man eats"]
    searched, search = [], translation.beam_search
    monkeypatch.setattr(
        translation, "beam_search", lambda model, ids, *rest: (searched.append(ids), search(model, ids, *rest))[1]
    )
    expected = translate(model, subwords, sentences, beam=2)
    alone = sorted(ids.tolist() for ids in searched)
    assert len(alone) > 2 and len(set(expected)) > 1
    for size in 2, 3:
        searched.clear()
        found = run_ranks(size, lambda ranks: translate(model, subwords, sentences, beam=2, ranks=ranks))
        assert found == size * [expected]
        assert sorted(ids.tolist() for ids in searched) == alone


def test_ranks_that_disagree_are_refused():
    def compare(ranks):
        ranks.expect_same({"seed": 0, "data": "ab" if ranks.rank < 2 else "cd"})

    with pytest.raises(ValueError, match=r"^rank 2 on .* has another data: 'cd', rank 0 has 'ab'$"):
        run_ranks(3, compare)

    def checksum(ranks):
        ranks.expect_same_bits("parameters", np.full(3, ranks.rank == 1, np.float32))

    with pytest.raises(ValueError, match=r"^rank 1 on .* has another checksum of parameters: "):
        run_ranks(2, checksum)


def test_an_error_in_rank_0_ends_the_others():
    ended = []

    def fail(ranks):
        try:
            ranks.from_first(lambda: int("x"))
        except Elsewhere:
            ended.append(ranks.rank)

    with pytest.raises(ValueError, match="invalid literal"):
        run_ranks(3, fail)
    assert sorted(ended) == [1, 2]


def test_more_ranks_than_micro_batches_are_refused(tmp_path):
    def ask(ranks):
        model = LanguageModel(29, d_model=12, heads=2, depth=1, context=8)
        Replicas(model, 1, micro_batch=4, ranks=ranks).expect_work(TextBatches(TEXT, 8, 8, Key(2)).batch(0))

    run_ranks(2, ask)
    with pytest.raises(ValueError, match=r"^3 ranks, but a batch has only 2 micro-batches: use fewer ranks, larger"):
        run_ranks(3, ask)


def test_without_a_launcher_nothing_of_mpi_is_loaded():
    code = (
        "import sys; from scratchformer.parallel.ranks import Ranks; print(Ranks.find().size, 'mpi4py' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["1", "False"]


def test_a_launcher_without_mpi4py_is_told_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    monkeypatch.setenv("PMIX_RANK", "0")
    with pytest.raises(ImportError, match=r"^mpiexec needs: pip install 'scratchformer\[distributed\]'"):
        Ranks.find()
