"""The derivation of GELU

GELU multiplies x by a smooth step from 0 to 1. GPT-2 writes the step with tanh: y = ½ x (1 + tanh(u)), where u is a
cubic polynomial of x. All of it is elementwise, so this is calculus with numbers: the derivative of a polynomial, the
chain rule, and the product rule. The derivative of tanh(u) is 1 − tanh(u)².

A line may use what the lines above it define. You may type sqrt(2/pi) for √(2/π), 1/2 for ½ and x_i^2 for x_i². Leave
the constants as they are: a slope that is right to three digits is wrong. Do not use ∂ in an answer.
"""

from scratchformer import ops


def gelu(x):
    """y = ½ x (1 + tanh(u)), elementwise.

    Forward, for each element i:

        u_i = √(2/π) (x_i + 0.044715 x_i³)
        h_i = tanh(u_i)
        y_i = ½ x_i (1 + h_i)

    Backward. First the slope of u, then the slope of h by the chain rule, as a function of h_i and a_i:

        a_i := ∂u_i/∂x_i = ⟦√(2/π) (1 + 3·0.044715 x_i²)⟧
        b_i := ∂h_i/∂x_i = ⟦(1 − h_i²) a_i⟧

    x_i is used twice in y_i, as a factor and in h_i. By the product rule

        ∂y_i/∂x_i = ⟦½ (1 + h_i) + ½ x_i b_i⟧

    Each output depends on one input, so the sum of the chain rule has one term:

        dx_i = dy_i ∂y_i/∂x_i
    """
    return ops.gelu(x, "tanh")


# The student's file ends here.

from ..grading import Derivation, normal

HINTS = (
    "u is a constant times a polynomial: differentiate x_i and 0.044715 x_i³. h has u inside tanh: the slope of tanh "
    "at u, times the slope of u.",
    "The derivative of x³ is 3x². The slope of tanh at u_i is 1 − h_i². The product rule for x_i (1 + h_i): the first "
    "factor's derivative is 1, the second's is b_i.",
    "a_i = √(2/π) (1 + 3·0.044715 x_i²). b_i is (1 − h_i²) times a_i. ∂y_i/∂x_i is ½ (1 + h_i) plus ½ x_i times b_i.",
)
LIBRARY = ops.gelu
MISTAKES = (
    (
        "½ (1 + h_i) + ½ x_i b_i",
        "½ (1 + h_i)",
        "∂y_i/∂x_i.*is not true",
        "the second term of the product rule is left out",
    ),
    ("√(2/π) (1 + 3·0.044715 x_i²)", "0.798 (1 + 0.134 x_i²)", "a_i := .*is not true: relative error .*e-0[34]"),
    ("(1 + 3·0.044715 x_i²)", "(1 + 0.044715 x_i²)", "a_i := .*is not true"),
    ("(1 − h_i²) a_i", "1 − h_i²", "b_i := .*is not true", "the slope of u is left out of the chain rule"),
    ("½ (1 + h_i) + ½ x_i b_i", "½ (1 + h_i) + b_i", "∂y_i/∂x_i.*is not true"),
)


def derivation(student):
    return Derivation(student.gelu, ops.gelu_backward, ((normal(0, 3, 4),), (normal(1, 2, 3),)))
