"""Random operations, each with its derivation and the same forward and backward in NumPy, written side by side.

y is a sum of terms. A term is a product of factors, summed or averaged over the letters that y does not have, and
repeated over those that only y has. So gradients are repeated, added up, constant, outer products and scattered.
"""

import linecache
import random
import re
from typing import NamedTuple

import numpy as np

ROWS = [(1,), (3,), (7,), (2, 3)]  # n stands for all leading axes
FUNCTIONS = {
    "{}": (lambda x: x, "1", np.ones_like),
    "{}²": (np.square, "2 {}", lambda x: 2 * x),
    "sin({})": (np.sin, "cos({})", np.cos),
    "tanh({})": (np.tanh, "(1 − tanh({})²)", lambda x: 1 - np.tanh(x) ** 2),
    "max({}, 0)": (lambda x: np.maximum(x, 0), "[{} > 0]", lambda x: 1.0 * (x > 0)),
}


class Factor(NamedTuple):
    name: str
    letters: str
    function: str
    ids: str = ""  # the letters of the integers that choose its first index

    @property
    def spread(self) -> str:
        """The letters of the factor in the forward."""
        return self.ids + self.letters[1:] if self.ids else self.letters

    def element(self) -> str:
        return f"{self.name}_{f'{{ids_{self.ids},{self.letters[1:]}}}' if self.ids else self.letters}".rstrip("_")

    def text(self) -> str:
        return FUNCTIONS[self.function][0] and self.function.format(self.element())

    def slope(self) -> str:
        return FUNCTIONS[self.function][1].format(self.element())


class RandomPair:
    """letters: of y and of each argument. lines: the equations. op, op_backward: functions with these equations."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        choose = self.random.choice
        a, b, column = self.random.sample("btgricj", 3)
        rows = choose(["n", "n", "n", a + b, f"n{a}", a, ""])
        every = rows + column
        self.sizes = {letter: choose(ROWS if letter == "n" else [2, 3, 5]) for letter in rows}
        self.sizes[column] = choose([1, 2, 4, 5, 9])
        self.letters = {"x": self.some(every, least=1)}
        for name in "vw":
            if choose([True, False]):
                self.letters[name] = self.some(every)
        if rows in ("n", a) and choose([True, False, False]):
            self.letters |= {"table": f"k{column}", "ids": rows}
            self.sizes["k"] = 4
        self.letters = {name: letters for name, letters in self.letters.items() if letters}
        self.constant = choose([1, 1, 2, 0.5])
        self.terms = []
        drawn = []
        for _ in range(choose([1, 1, 2])):
            names = self.random.sample(
                [n for n in self.letters if n != "ids"], choose([1, 1, 2, 2, 3]) % len(self.letters) or 1
            )
            factors = [self.factor(name) for name in names]
            drawn.append(factors)
        used = {factor.name for factors in drawn for factor in factors}
        used |= {"ids"} if "table" in used else set()
        used |= {
            name
            for name, letters in self.letters.items()
            if name not in ("ids", "table") and ("n" in letters or "n" not in rows)
        }
        self.letters = {name: letters for name, letters in self.letters.items() if name in used}
        self.y = self.some("".join(each for each in every if any(each in x for x in self.letters.values())))
        for factors in drawn:
            inside = sorted({*"".join(f.spread for f in factors)} - {*self.y})
            self.terms.append((factors, [(letter, choose(["Σ", "mean"])) for letter in inside]))
        self.lines = [f"{indexed('y', self.y)} = {' + '.join(map(self.forward_text, self.terms))}"]
        for name in self.letters:
            if name != "ids":
                self.lines.append(f"{indexed('d' + name, self.letters[name])} = {self.gradient_text(name)}")
        shared = [name for name in self.letters if "n" not in self.letters[name]]
        alone = all(
            any(line.startswith(f"d{name}_{self.letters[name]} = Σ_n") and " + " not in line for line in self.lines)
            for name in shared
        )
        last = {letters[-1] for letters in [self.y, *self.letters.values()] if letters}
        columns = last - {letter for letters in [self.y, *self.letters.values()] for letter in letters[:-1]} - {"n"}
        self.clear = ("n" not in rows or alone) and len(columns) < 2  # whether the rules say which array has which axes
        depends = all(any("n" in f.spread for f in factors) for factors, _ in self.terms)
        if (
            rows == "n"
            and self.y[:1] == "n"
            and alone
            and depends
            and "table" not in self.letters
            and choose([True, False])
        ):  # n may be left out
            self.lines = [line if "_n " in line or " + " in line else without_n(line) for line in self.lines]
        self.op, self.op_backward = self.functions(seed)

    def some(self, letters: str, least: int = 0) -> str:
        """Some of the letters, most often in their order; n is always the first."""
        found = [each for each in letters if self.random.random() < 0.7] or list(letters[-1:] * least)
        if self.random.random() < 0.15:
            self.random.shuffle(found)
        return "".join(sorted(found, key=lambda each: each != "n"))

    def factor(self, name: str) -> Factor:
        ids = self.letters["ids"] if name == "table" else ""
        return Factor(name, self.letters[name], self.random.choice([*FUNCTIONS, "{}", "{}"]), ids)

    def forward_text(self, term: tuple) -> str:
        factors, over = term
        text = " ".join(factor.text() for factor in factors)
        for letter, function in over:
            text = f"{function}_{letter}({text})"
        return text if self.constant == 1 else f"{self.constant} {text}"

    def gradient_text(self, name: str) -> str:
        """The gradient of an argument: of each term in which it is, dy times the other factors and the slope, summed
        over what the argument does not have.
        """
        texts = []
        for factors, over in self.terms:
            for factor in (each for each in factors if each.name == name):
                parts = [indexed("dy", self.y), *(f.text() for f in factors if f is not factor)]
                there = {*self.y, *"".join(f.spread for f in factors if f is not factor)}
                summed = [letter for letter in self.y if letter not in factor.letters]
                summed += [letter for f in factors for letter in f.spread if letter not in factor.letters + self.y]
                if factor.ids:
                    parts = [f"[ids_{factor.ids} = k]", *parts]
                    summed.append(factor.ids)
                inner = [letter for letter in dict.fromkeys(summed) if letter in there or letter == factor.ids]
                outer = [factor.slope()] if factor.function != "{}" and not factor.ids else []
                if factor.ids and factor.function != "{}":
                    parts.append(factor.slope())
                before = [f"1/{letter.upper()}" for letter, function in over if function == "mean"]
                before += [letter.upper() for letter in dict.fromkeys(summed) if letter not in inner]
                before += [str(self.constant)] * (self.constant != 1)
                text = " ".join(parts)
                for letter in sorted(inner, key=lambda letter: letter == "n"):
                    text = f"Σ_{letter} {text}"
                if inner and before + outer:  # a sum over rows stands alone
                    text = text.replace("Σ_" + inner[-1] + " ", "Σ_" + inner[-1] + " " + " ".join(before + outer) + " ")
                    before = outer = []
                texts.append(" ".join([*before, *outer, text]))
        return " + ".join(texts) or "0"

    # The same in NumPy

    def einsum(self, factors: list[tuple[np.ndarray, str]], to: str) -> np.ndarray:
        """The product of factors, summed over what is not in `to`, and repeated over what is only there."""
        missing = "".join(letter for letter in to if not any(letter in letters for _, letters in factors))
        ones = [(np.ones([self.count(letter) for letter in missing]), missing)]
        operands = [*factors, *ones]
        return np.einsum(f"{','.join(letters for _, letters in operands)}->{to}", *(array for array, _ in operands))

    def count(self, letter: str) -> int:
        return int(np.prod(self.sizes[letter]))

    def shape(self, letters: str, folded: bool = False) -> tuple[int, ...]:
        sizes = [self.sizes[letter] for letter in letters]
        return tuple(
            n
            for size in sizes
            for n in ((int(np.prod(size)),) if folded else size if isinstance(size, tuple) else (size,))
        )

    def parts(self, values: dict, term: tuple, slope_of: Factor | None = None) -> list:
        found = []
        for factor in term[0]:
            x = values[factor.name]
            x = x[values["ids"]] if factor.ids else x
            found.append((FUNCTIONS[factor.function][2 if factor is slope_of else 0](x), factor.spread))
        return found

    def scale(self, term: tuple) -> float:
        return self.constant / np.prod([self.count(letter) for letter, function in term[1] if function == "mean"])

    def forward(self, *args: np.ndarray) -> np.ndarray:
        values = self.folded(args)
        y = sum(self.scale(term) * self.einsum(self.parts(values, term), self.y) for term in self.terms)
        return np.asarray(y).reshape(self.shape(self.y))[()].copy()

    def folded(self, args: tuple) -> dict[str, np.ndarray]:
        for name, x in zip(self.letters, args, strict=True):
            for axis, letter in enumerate(reversed(self.letters[name])):
                if letter != "n":
                    self.sizes[letter] = x.shape[-1 - axis]
            if self.letters[name][:1] == "n":
                self.sizes["n"] = x.shape[: x.ndim - len(self.letters[name]) + 1]
        return {
            name: x.reshape(self.shape(self.letters[name], folded=True))
            for name, x in zip(self.letters, args, strict=True)
        }

    def backward(self, dy: np.ndarray, *args: np.ndarray) -> list[np.ndarray]:
        values, gradients = self.folded(args), []
        dy = np.reshape(dy, self.shape(self.y, folded=True))
        for name in (name for name in self.letters if name != "ids"):
            total = np.zeros(values[name].shape)
            for term in self.terms:
                for factor in (each for each in term[0] if each.name == name):
                    d = self.einsum([(dy, self.y), *self.parts_but(values, term, factor)], factor.spread)
                    if factor.ids:
                        np.add.at(total, values["ids"], self.scale(term) * d)
                    else:
                        total += self.scale(term) * d
            gradients.append(total.reshape(self.shape(self.letters[name])))
        return gradients

    def parts_but(self, values: dict, term: tuple, factor: Factor) -> list:
        """The other factors, and the slope of this one."""
        return self.parts(values, term, slope_of=factor)

    def functions(self, seed: int) -> tuple:
        arguments = ", ".join(self.letters)
        lines = "".join(f"        {line}\n" for line in self.lines)
        source = f'def op({arguments}):\n    """Products.\n\n    Equations:\n\n{lines}    """\n'
        source += f"    return pair.forward({arguments}), ({arguments},)\n\n"
        source += f"def op_backward(dy, cache):\n    {arguments}, = cache\n"
        gradients = [name for name in self.letters if name != "ids"]
        source += f"    gradients = pair.backward(dy, {arguments})\n"
        source += f"    return {'gradients[0]' if len(gradients) == 1 else 'tuple(gradients)'}\n"
        file = f"<random pair {seed}>"
        linecache.cache[file] = len(source), None, source.splitlines(keepends=True), file
        space = {"pair": self}
        exec(compile(source, file, "exec"), space)
        return space["op"], space["op_backward"]

    def arguments(self, seed: int = 0) -> list[np.ndarray]:
        rng = np.random.default_rng(seed)
        return [
            rng.integers(0, self.sizes["k"], self.shape(letters))
            if name == "ids"
            else rng.standard_normal(self.shape(letters))
            for name, letters in self.letters.items()
        ]


def without_n(line: str) -> str:
    return re.sub(r"_n(?![a-z])", "", line).replace("_n", "_").replace("{ids_,", "{ids,")


def indexed(name: str, letters: str) -> str:
    return f"{name}_{letters}" if letters else name
