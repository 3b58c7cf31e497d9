"""The derivation of linear

x_ni is the number in row n and column i of x, and y_no = Σ_i x_ni w_io + b_o is one equation for each row n and each
output o. For each argument, ask which outputs it affects, and add up over all of them: that is the chain rule.

Replace each `?` by an expression with indices. A check evaluates the equations on small arrays, from top to bottom, and
names the first one that is not true. You can check as often as you like, also while there are blanks below.

An index that stands only on the right needs a sum. δ_oj is 1 where o = j and 0 elsewhere. You may type sum_o for Σ_o
and d_oj for δ_oj. Do not use ∂ in an answer.
"""

from scratchformer import ops


def linear(x, w, b):
    """y = x w + b. x: (N, I), w: (I, O), b: (O,).

    Forward, for each row n and output o:

        y_no = Σ_i x_ni w_io + b_o

    Backward. The first partial derivative is given as an example. Row n' of x affects only row n' of y, so there is a
    δ:

        ∂y_no/∂x_n'i = δ_nn' w_io

    In the chain rule, the δ leaves the terms of one row. Only the sum over the outputs remains:

        dx_ni = Σ_{n',o} dy_n'o ∂y_n'o/∂x_ni = ⟦Σ_o dy_no w_io⟧

    Every row uses the same w. w_ij is the weight from input i to output j:

        ∂y_no/∂w_ij = ⟦x_ni δ_oj⟧
        dw_io = Σ_{n,j} dy_nj ∂y_nj/∂w_io = ⟦Σ_n x_ni dy_no⟧

    And b_o is added to output o of every row:

        db_o = ⟦Σ_n dy_no⟧
    """
    return ops.linear(x, w, b)


# The student's file ends here.

from ..grading import Derivation, normal

HINTS = (
    "x_ni is in row n of y only, in all of its outputs. w_io is in output o only, in all of its rows. So dx sums over "
    "the outputs o, and dw and db sum over the rows n.",
    "Each term is a product, so its derivative by one factor is the other factor: x_ni affects y_no with the factor "
    "w_io, and w_io affects y_no with the factor x_ni.",
    "dx_ni = Σ_o dy_no (the factor of x_ni in y_no), dw_io = Σ_n dy_no (the factor of w_io in y_no), and b_o has the "
    "factor 1. In ∂y_no/∂w_ij, a δ says that weight j reaches only output o = j.",
)
LIBRARY = ops.linear
MISTAKES = (
    ("= Σ_o dy_no w_io", "= Σ_n dy_no w_io", "index o is on the right only"),
    ("= Σ_o dy_no w_io", "= Σ_o dy_no x_ni", "dx_ni.*is not true"),
    ("= x_ni δ_oj", "= x_ni", "∂y_no/∂w_ij.*is not true", "the δ is left out: weight w_ij reaches only output o = j"),
    ("= Σ_n x_ni dy_no", "= x_ni dy_no", "index n is on the right only"),
    ("= Σ_n x_ni dy_no", "= mean_n(x_ni dy_no)", "dw_io.*is not true"),
    ("= Σ_n dy_no\n", "= partial L/partial b_o\n", r"line \d+: write the right side without ∂"),
    ("= Σ_n dy_no\n", "= mean_n(dy_no)\n", "db_o.*is not true"),
)


def derivation(student):
    runs = [(normal(0, n, i), normal(1, i, o), normal(2, o)) for n, i, o in ((4, 3, 2), (2, 4, 3))]
    return Derivation(student.linear, ops.linear_backward, runs)
