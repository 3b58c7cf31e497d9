"""The command `scratchformer`: doctor, check, generate, evaluate, plot."""

from __future__ import annotations

import argparse
import sys
from itertools import chain
from pathlib import Path

from .training.program import run_program


def main(argv: list[str] | None = None) -> None:
    """Parse the command line and run one command; errors are one line and exit status 1."""
    parser = argparse.ArgumentParser(prog="scratchformer", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    command = commands.add_parser("doctor", help="print what a bug report needs")
    command.set_defaults(run=doctor)

    command = commands.add_parser("check", help="check gradients of all operations and layers, or of some")
    command.add_argument("names", nargs="*", metavar="NAME", help="such as attention, SelfAttention, LanguageModel")
    command.add_argument("--device", default="cpu", help="cpu, gpu, gpu:1")
    command.add_argument("--seed", type=int, default=0)
    command.add_argument("--details", action="store_true", help="a row for every tensor, not for every case")
    command.set_defaults(run=check)

    command = commands.add_parser("generate", help="let a trained language model write")
    command.add_argument("run_folder", metavar="RUN", help="folder of a run, or a snapshot")
    command.add_argument("--prompt", default="\n", help="what to continue (default: a new line)")
    command.add_argument("--tokens", type=int, default=500, help="how many bytes to write (default: 500)")
    command.add_argument("--temperature", type=float, default=0.8, help="0 is greedy (default: 0.8)")
    command.add_argument("--top-k", type=int)
    command.add_argument("--top-p", type=float)
    command.add_argument("--seed", type=int, default=0)
    command.add_argument("--device", default="auto")
    command.set_defaults(run=generate)

    command = commands.add_parser("evaluate", help="score a trained model on held-out data")
    command.add_argument("run_folder", metavar="RUN", help="folder of a run of examples/imdb.py or examples/enwik8.py")
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

    if not check_cases(args.names, get_device(args.device), args.seed, args.details):
        sys.exit("some gradients are wrong")


def generate(args: argparse.Namespace) -> None:
    from .backend import get_device
    from .generation import printable, stream_text
    from .models import LanguageModel
    from .rng import Key
    from .training import best_snapshot, load_model

    model, _ = load_model(best_snapshot(args.run_folder))
    if not isinstance(model, LanguageModel):
        raise ValueError(f"{args.run_folder} holds a {type(model).__name__}, which does not write")
    if not args.prompt:
        raise ValueError("--prompt: expected at least one character")
    if args.tokens < 0:
        raise ValueError(f"--tokens: expected a number >= 0, got {args.tokens}")
    prompt = args.prompt.encode("utf-8", "surrogateescape")  # the bytes that were typed, UTF-8 or not
    options = {"temperature": args.temperature, "top_k": args.top_k, "top_p": args.top_p, "key": Key(args.seed)}
    texts = stream_text(model.to(get_device(args.device)), prompt, args.tokens, **options)
    first = next(texts, "")  # before the prompt is printed, so that a mistake in the options is the only line
    for text in chain([prompt.decode("utf-8", "replace"), first], texts):
        print(printable(text), end="", flush=True)
    print()


def evaluate(args: argparse.Namespace) -> None:
    from .backend import get_device
    from .data import VALIDATION_BYTES, Vocabulary, load_enwik8, load_imdb
    from .models import Classifier
    from .training import (
        Replicas,
        SnapshotError,
        best_snapshot,
        evaluate_classifier,
        evaluate_language_model,
        load_model,
    )
    from .training.program import read_settings

    settings = read_settings(Path(args.run_folder))
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
            part = corpus.test if args.part == "test" else corpus.validation[:VALIDATION_BYTES]
            found = evaluate_language_model(replicas, part)
    print(f"{args.part}: " + ", ".join(f"{name} {value:.4f}" for name, value in found.items()))


def plot(args: argparse.Namespace) -> None:
    from .plots import plot_run

    if args.out and Path(args.out).is_file():
        raise ValueError(f"--out: {args.out} is no folder")
    for path in plot_run(Path(args.run_folder), args.text, args.out and Path(args.out)):
        print(path)


if __name__ == "__main__":
    main()
