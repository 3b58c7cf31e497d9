"""Train a small GPT-2 on text with a sub-word vocabulary of its own, or fine-tune a published one; then let it write.

--pretrained FOLDER begins with a published GPT-2 as Hugging Face has it: config.json, model.safetensors, vocab.json
and merges.txt. Without --data the text is Wikipedia (enwik8); without a network, the sources of Python's standard
library, as with --data stdlib. Nothing need be trained to let a published one write: scratchformer generate FOLDER.
"""

from scratchformer import Key
from scratchformer.data import VALIDATION_BYTES, Subwords, TextBatches, as_text
from scratchformer.generation import printable, stream_text
from scratchformer.models import GPT2
from scratchformer.optim import AdamW, Cosine
from scratchformer.training import Replicas, best_snapshot, estimate, evaluate_language_model, load_model, train
from scratchformer.training.memory import resident_bytes
from scratchformer.training.program import SUBWORDS, load_corpus, load_gpt2, run_program, start_run

PRESETS = {
    "small": dict(
        vocabulary=4096, d_model=128, heads=4, depth=4, context=128, dropout=0.0,
        batch_size=32, lr=2e-3, weight_decay=0.1, warmup=100, steps=1000, evaluate_every=250, test_bytes=None,
    ),
    "pretrained": dict(
        dropout=0.1, batch_size=4, lr=5e-5, weight_decay=0.1, warmup=10, steps=100, evaluate_every=50,
        test_bytes=VALIDATION_BYTES,
    ),
}  # fmt: skip
OPTIONS = {
    "pretrained": dict(metavar="PATH", help="folder of a published GPT-2, as Hugging Face has it, to begin with"),
}


def published_model(run):
    """The model and its vocabulary of --preset pretrained: published ones, or those of the run that is resumed. None
    for another preset.
    """
    if run.preset != "pretrained":
        if run.pretrained is not None:
            raise ValueError(f"--pretrained: has its own sizes, so leave out --preset {run.preset}")
        return None
    if run.pretrained is None:
        raise ValueError("--preset pretrained: needs --pretrained FOLDER")
    last = run.out / "last.safetensors"
    if last.exists():
        return load_model(last)[0], Subwords.load(run.out / SUBWORDS)
    return load_gpt2(run.pretrained, dropout=run.dropout)


def make_model(run, corpus, key):
    """A new model, and its vocabulary: that of the run that is resumed, or a new one."""
    if (run.out / "last.safetensors").exists():
        vocabulary = Subwords.load(run.out / SUBWORDS)
    else:
        vocabulary = Subwords.byte_bpe(as_text(corpus.train, corpus.name).splitlines(keepends=True), run.vocabulary)
    sizes = {name: getattr(run, name) for name in ("d_model", "heads", "depth", "context", "dropout")}
    return GPT2(len(vocabulary), key=key.fold("weights"), **sizes), vocabulary


def main(argv=None):
    run = start_run("gpt2", __doc__, PRESETS, argv, OPTIONS)
    key, before = Key(run.seed), resident_bytes()
    published = published_model(run)  # before the corpus, which may have to be downloaded
    before -= resident_bytes()
    corpus = load_corpus(run)
    before += resident_bytes()  # without the model
    model, vocabulary = published or make_model(run, corpus, key)
    model.to(run.device)
    parts = corpus.train, corpus.validation[:VALIDATION_BYTES], corpus.test[: run.test_bytes]
    training, validation, test = (vocabulary.encode_long(as_text(part, corpus.name)) for part in parts)
    print(f"{corpus.name}: {len(corpus.train):,} training bytes, {len(training):,} tokens of {len(vocabulary):,} kinds")
    print(f"{model.flat.data.size:,} parameters")

    def save():
        vocabulary.save(run.out / SUBWORDS)
        run.save()

    batches = TextBatches(training, run.batch_size, model.context, key.fold("batches"))
    with Replicas(model, **run.replicas_on_device()) as replicas:
        print(replicas.describe(batches.batch(0)))
        if run.estimate:
            return print(estimate(replicas, batches.batch(0), before))
        state = train(
            replicas,
            AdamW(model.parameters(), run.lr, weight_decay=run.weight_decay),
            Cosine(run.lr, min(run.warmup, run.steps // 5), run.steps, floor=run.lr / 10),
            batches,
            run.steps,
            run.out,
            evaluate=lambda: evaluate_language_model(replicas, validation, sizes=vocabulary.sizes),
            evaluate_every=run.evaluate_every,
            select=("bits_per_byte", "min"),
            seed=run.seed,
            identity={"corpus": corpus.name, "data": corpus.fingerprint, "subwords": vocabulary.fingerprint},
            resume=run.resume,
            tensorboard=run.tensorboard,
            on_start=save,
        )
        best, _ = load_model(best_snapshot(run.out))
        model.load_state_dict(best.state_dict())
        found = evaluate_language_model(replicas, test, sizes=vocabulary.sizes)
        print(
            f"{corpus.name}: {found['bits_per_byte']:.4f} bits per byte ({found['loss']:.4f} nats per token) ", end=""
        )
        print(f"of the test part, the best of {state['step']} steps")

    prompt = vocabulary.decode(test[: min(64, model.context // 2)])
    print(f"\n--- the model continues a text it has not seen ---\n{printable(prompt)}|", end="")
    for text in stream_text(model, prompt, 150, vocabulary, temperature=0.7, key=key.fold("sample")):
        print(printable(text), end="", flush=True)
    print(f"\n---\nmore of it: scratchformer generate {run.out}")


if __name__ == "__main__":
    run_program(main)
