"""The command `scratchformer`: doctor, check, generate, translate, evaluate, plot."""

from __future__ import annotations

import argparse
import sys
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .training.program import run_program, take_any_text

if TYPE_CHECKING:
    from .data import Subwords
    from .models import EncoderDecoder


def main(argv: list[str] | None = None) -> None:
    """Parse the command line and run one command; errors are one line and exit status 1."""
    take_any_text()  # before anything is printed, the help included
    parser = argparse.ArgumentParser(prog="scratchformer", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    command = commands.add_parser("doctor", help="print what a bug report needs")
    command.set_defaults(run=doctor)

    command = commands.add_parser("check", help="check gradients of all operations and layers, or of some")
    command.add_argument("names", nargs="*", metavar="NAME", help="such as attention, SelfAttention, LanguageModel")
    command.add_argument("--only", choices=("reference", "twin"), help="one of the two (default: both)")
    command.add_argument("--device", default="cpu", help="cpu, gpu, gpu:1")
    command.add_argument("--seed", type=int, default=0)
    command.add_argument("--details", action="store_true", help="a row for every tensor, not for every case")
    command.set_defaults(run=check)

    command = commands.add_parser("generate", help="let a trained language model write")
    command.add_argument("run_folder", metavar="RUN", help="folder of a run, a snapshot, or a published GPT-2")
    command.add_argument("--prompt", default="\n", help="what to continue (default: a new line)")
    command.add_argument(
        "--tokens", type=int, default=500, help="how many tokens, such as bytes, to write (default: 500)"
    )
    command.add_argument("--temperature", type=float, default=0.8, help="0 is greedy (default: 0.8)")
    command.add_argument("--top-k", type=int)
    command.add_argument("--top-p", type=float)
    command.add_argument("--seed", type=int, default=0)
    command.add_argument("--device", default="auto")
    command.set_defaults(run=generate)

    command = commands.add_parser("translate", help="let a trained encoder-decoder translate")
    command.add_argument("run_folder", metavar="RUN", help="folder of a run of examples/translate.py")
    command.add_argument("sentences", nargs="*", metavar="SENTENCE", help="(default: the lines of standard input)")
    command.add_argument("--beam", type=int, help="hypotheses that are kept; 1 is greedy (default: as in the run)")
    command.add_argument("--length-penalty", type=float, help="(default: as in the run)")
    command.add_argument("--device", default="auto")
    command.set_defaults(run=translate)

    command = commands.add_parser("evaluate", help="score a trained model on held-out data")
    command.add_argument("run_folder", metavar="RUN", help="folder of a run of one of the examples")
    command.add_argument("--data", metavar="PATH", help="the data, if not where the run found it")
    command.add_argument("--part", choices=("validation", "test"), default="test")
    command.add_argument("--device", default="auto")
    command.set_defaults(run=evaluate)

    command = commands.add_parser("plot", help="draw the curves of a run, its attention maps and its positions")
    command.add_argument("run_folder", metavar="RUN", help="folder of a run")
    command.add_argument("--text", help="the text whose attention is shown")
    command.add_argument("--out", metavar="DIR", help="where the pictures go (default: RUN/plots)")
    command.set_defaults(run=plot)

    args = parser.parse_args(argv)
    run_program(lambda: args.run(args))


def doctor(args: argparse.Namespace) -> None:
    from .doctor import report

    for subject, finding in report():
        print(f"{subject:<14} {finding}")


def check(args: argparse.Namespace) -> None:
    from .backend import get_device
    from .testing.cases import check_cases

    if wrong := check_cases(args.names, get_device(args.device), args.seed, args.details, args.only):
        sys.exit(f"wrong: {', '.join(wrong)}")


def generate(args: argparse.Namespace) -> None:
    from .backend import get_device
    from .generation import printable, stream_text
    from .rng import Key
    from .training.program import load_writer

    model, vocabulary = load_writer(args.run_folder)
    if not args.prompt:
        raise ValueError("--prompt: expected at least one character")
    if args.tokens < 0:
        raise ValueError(f"--tokens: expected a number >= 0, got {args.tokens}")
    prompt = args.prompt.encode("utf-8", "surrogateescape")  # the bytes that were typed, UTF-8 or not
    options = {"temperature": args.temperature, "top_k": args.top_k, "top_p": args.top_p, "key": Key(args.seed)}
    texts = stream_text(model.to(get_device(args.device)), prompt, args.tokens, vocabulary, **options)
    first = next(texts, "")  # before the prompt is printed, so that a mistake in the options is the only line
    for text in chain([prompt.decode("utf-8", "replace"), first], texts):
        print(printable(text), end="", flush=True)
    print()


def translate(args: argparse.Namespace) -> None:
    from . import generation
    from .backend import get_device
    from .training.program import read_settings

    run = Path(args.run_folder)
    model, subwords, _ = translator(run)
    settings = read_settings(run if run.is_dir() else run.parent, "beam", "length_penalty")
    max_length = settings.get("max_length")
    beam = settings["beam"] if args.beam is None else args.beam
    penalty = settings["length_penalty"] if args.length_penalty is None else args.length_penalty
    sentences = [as_typed(sentence) for sentence in args.sentences or map(str.strip, sys.stdin)]
    model.to(get_device(args.device))
    for text in generation.translate(model, subwords, sentences, beam, penalty, max_length):
        print(generation.printable(text))


def translator(run: Path) -> tuple[EncoderDecoder, Subwords, dict[str, Any]]:
    """The model of a run of examples/translate.py, the mean of its last snapshots if there is one, with its vocabulary
    and the state of its run.
    """
    from .models import EncoderDecoder
    from .training import best_snapshot, load_model
    from .training.program import load_subwords

    mean = run / "average.safetensors"
    model, state = load_model(mean if mean.is_file() else best_snapshot(run))
    if not isinstance(model, EncoderDecoder):
        raise ValueError(f"{run} holds a {type(model).__name__}, which does not translate")
    return model, load_subwords(run, state), state


def evaluate(args: argparse.Namespace) -> None:
    from .training.program import read_settings

    program = read_settings(Path(args.run_folder))["program"]
    {"translate": evaluate_translations, "bert": evaluate_bert}.get(program, evaluate_texts)(args)


def evaluate_translations(args: argparse.Namespace) -> None:
    from . import generation
    from .backend import get_device
    from .data import load_multi30k
    from .training import SnapshotError
    from .training.program import read_settings

    run = Path(args.run_folder)
    settings = read_settings(run, "source", "target", "beam", "length_penalty")
    model, subwords, state = translator(run)
    data = load_multi30k(args.data or settings["data"], settings["source"], settings["target"])
    if data.fingerprint != state.get("data"):
        raise SnapshotError("the model was trained on other data, not on these sentences")
    part, model = getattr(data, args.part), model.to(get_device(args.device))
    found = generation.translate(model, subwords, part.source, settings["beam"], settings["length_penalty"])
    score, signature = generation.bleu(found, part.target)
    print(f"{args.part}: bleu {score:.2f}, beam {settings['beam']} ({signature})")


def evaluate_bert(args: argparse.Namespace) -> None:
    from .backend import get_device
    from .data import Subwords, load_imdb_subwords, single_texts
    from .training import Replicas, SnapshotError, best_snapshot, evaluate_classifier, load_model
    from .training.folder import holds_run
    from .training.program import SUBWORDS, read_settings

    run = Path(args.run_folder)
    settings = read_settings(run, "vocabulary", "max_length")
    stages = ("finetune", "finetune-head", "finetune-lora", "scratch")
    stages = [stage for stage in stages if holds_run(run / stage)]
    if not stages:
        raise ValueError(f"{run} holds no classifier: it is only pre-trained yet")
    vocabulary = Subwords.load(run / SUBWORDS)
    options = {"seed": settings["seed"], "vocabulary": vocabulary}
    data = load_imdb_subwords(args.data or settings["data"], settings["vocabulary"], **options)
    part = single_texts(getattr(data, args.part), vocabulary)
    for stage in stages:
        model, state = load_model(best_snapshot(run / stage))
        if vocabulary.fingerprint != state.get("vocabulary"):
            raise SnapshotError(f"{run / stage}: the snapshot was made with another vocabulary")
        if data.fingerprint != state.get("data"):
            raise SnapshotError("the model was trained on other data, not on these reviews")
        length = min(settings["max_length"], model.body.max_length)
        with Replicas(model.to(get_device(args.device))) as replicas:
            found = evaluate_classifier(replicas, part, length, "both")
        print(f"{stage}: {args.part}: " + ", ".join(f"{name} {value:.4f}" for name, value in found.items()))


def evaluate_texts(args: argparse.Namespace) -> None:
    from .backend import get_device
    from .data import VALIDATION_BYTES, Vocabulary, as_text, load_enwik8, load_imdb
    from .models import Classifier, TransformerXL
    from .training import (
        Replicas,
        SnapshotError,
        best_snapshot,
        evaluate_classifier,
        evaluate_language_model,
        evaluate_transformer_xl,
        load_model,
    )
    from .training.program import load_subwords, read_settings

    settings = read_settings(Path(args.run_folder))
    if settings["program"] in ("digits", "units"):
        raise ValueError(f"{args.run_folder} is a run of {settings['program']}, which tells its score itself")
    model, state = load_model(best_snapshot(args.run_folder))
    model.to(get_device(args.device))
    path = args.data or settings["data"]
    with Replicas(model) as replicas:
        if isinstance(model, Classifier):
            settings = read_settings(Path(args.run_folder), "vocabulary", "keep")
            vocabulary = Vocabulary.load(Path(args.run_folder) / "vocabulary.txt")
            if vocabulary.fingerprint != state.get("vocabulary"):
                raise SnapshotError(f"{args.run_folder}: the snapshot was made with another vocabulary")
            data = load_imdb(path, settings["vocabulary"], seed=settings["seed"], vocabulary=vocabulary)
            if data.fingerprint != state.get("data"):
                raise SnapshotError("the model was trained on other data, not on these reviews")
            part = getattr(data, args.part)
            found = evaluate_classifier(replicas, part, model.body.max_length, settings["keep"])
        else:
            corpus = load_enwik8(path)
            if corpus.fingerprint != state.get("data"):
                raise SnapshotError(
                    f"the model was trained on other data: {state.get('corpus')}, not this {corpus.name}"
                )
            test = corpus.test[: settings.get("test_bytes")]
            part, options = test if args.part == "test" else corpus.validation[:VALIDATION_BYTES], {}
            if subwords := load_subwords(args.run_folder, state):
                part, options = subwords.encode_long(as_text(part, corpus.name)), {"sizes": subwords.sizes}
            score = evaluate_transformer_xl if isinstance(model, TransformerXL) else evaluate_language_model
            found = score(replicas, part, **options)
    print(f"{args.part}: " + ", ".join(f"{name} {value:.4f}" for name, value in found.items()))


def plot(args: argparse.Namespace) -> None:
    from .plots import plot_run

    if args.out and Path(args.out).is_file():
        raise ValueError(f"--out: {args.out} is no folder")
    text = None if args.text is None else as_typed(args.text)
    for path in plot_run(Path(args.run_folder), text, args.out and Path(args.out)):
        print(path)


def as_typed(text: str) -> str:
    """Text of the command line or standard input, read as UTF-8 where the locale (LC_ALL=C) could not decode it."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


if __name__ == "__main__":
    main()
