"""A part of the second derivative

What was wrong. As with any saved intermediate, the framework takes it for a constant when it differentiates backward.
For y = x t with t = x² saved, a right backward is v (t + 2x²). It depends on x in two places, and one of them is t.
The second derivative comes out as 4xv instead of 6xv: plausible, and wrong by a third.

Why its tests passed. They checked first derivatives, which are right at every x.

What finds it. The backward taken as an operation of x and v, and compared with numerical differences.

How to derive it. Write t as what it is before the product rule:

    g = v (t(x) + 2x²), so ∂g/∂x = v (t′ + 4x) = v (2x + 4x)
"""

SOURCE = "pytorch/pytorch 76185"
ARGUMENTS = ("N", "N")
NAMED = "2 x is left out"


def forward(x, v):
    """g = v (t + 2x²) with t = x², the backward of x³ for the upstream gradient v.

        t_n = x_n²        y_n = v_n (t_n + 2 x_n²)
        dv_n = dy_n (t_n + 2 x_n²)        dx_n = dy_n v_n (2 x_n + 4 x_n)

    In NumPy:

        dx = dy * v * (2 * x + 4 * x)
    """
    t = x * x
    return v * (t + 2 * x**2), (x, v, t)


def wrong(dy, cache):
    x, v, t = cache
    return dy * v * (4 * x), dy * (t + 2 * x**2)


def right(dy, cache):
    x, v, t = cache
    dx = dy * v * (2 * x + 4 * x)
    return dx, dy * (t + 2 * x**2)
