"""33 functions with gradients as their authors write them who have read no docs: in the style of CS231n, of scipy's
optimizers, of classes with state, of micrograd.

Nothing is adapted in them but the lines that end in "# was: ...".
"""

# ruff: noqa: NPY002, RUF059 (it is not written by this project)

import numpy as np

# CS231n: several arguments, a cache, dictionaries of settings.


def affine_forward(x, w, b):
    out = x.reshape(x.shape[0], -1).dot(w) + b
    cache = (x, w, b)
    return out, cache


def affine_backward(dout, cache):
    x, w, b = cache
    dx = dout.dot(w.T).reshape(x.shape)
    dw = x.reshape(x.shape[0], -1).T.dot(dout)
    db = np.sum(dout, axis=0)
    return dx, dw, db


def relu_forward(x):
    out = np.maximum(0, x)
    return out, x


def relu_backward(dout, cache):
    dx = dout
    dx[cache <= 0] = 0
    return dx


def softmax_loss(x, y):
    probs = np.exp(x - np.max(x, axis=1, keepdims=True))
    probs /= np.sum(probs, axis=1, keepdims=True)
    n = x.shape[0]
    loss = -np.sum(np.log(probs[np.arange(n), y])) / n
    dx = probs.copy()
    dx[np.arange(n), y] -= 1
    dx /= n
    return loss, dx


def svm_loss(x, y):
    n = x.shape[0]
    margins = np.maximum(0, x - x[np.arange(n), y][:, np.newaxis] + 1.0)
    margins[np.arange(n), y] = 0
    loss = np.sum(margins) / n
    dx = (margins > 0).astype(float)
    dx[np.arange(n), y] -= np.sum(margins > 0, axis=1)
    return loss, dx / n


def batchnorm_forward(x, gamma, beta, bn_param):
    momentum = bn_param.get("momentum", 0.9)
    mean, var = x.mean(axis=0), x.var(axis=0)
    std = np.sqrt(var + bn_param.get("eps", 1e-5))
    x_hat = (x - mean) / std
    bn_param["running_mean"] = momentum * bn_param["running_mean"] + (1 - momentum) * mean
    bn_param["running_var"] = momentum * bn_param["running_var"] + (1 - momentum) * var
    return gamma * x_hat + beta, (x_hat, gamma, std)


def batchnorm_backward(dout, cache):
    x_hat, gamma, std = cache
    n = dout.shape[0]
    dbeta = dout.sum(axis=0)
    dgamma = (dout * x_hat).sum(axis=0)
    dx = gamma / std / n * (n * dout - dbeta - x_hat * dgamma)
    return dx, dgamma, dbeta


def dropout_forward(x, dropout_param):
    p, mode = dropout_param["p"], dropout_param["mode"]
    if "seed" in dropout_param:
        np.random.seed(dropout_param["seed"])
    mask = None
    if mode == "train":
        mask = (np.random.rand(*x.shape) < p) / p
        x = x * mask
    return x, (dropout_param, mask)


def dropout_backward(dout, cache):
    dropout_param, mask = cache
    if dropout_param["mode"] == "train":
        return dout * mask
    return dout


def conv_forward_naive(x, w, b, conv_param):
    stride, pad = conv_param["stride"], conv_param["pad"]
    n, c, h, width = x.shape
    f, _, hh, ww = w.shape
    xp = np.pad(x, ((0, 0), (0, 0), (pad, pad), (pad, pad)))
    ho, wo = 1 + (h + 2 * pad - hh) // stride, 1 + (width + 2 * pad - ww) // stride
    out = np.zeros((n, f, ho, wo))
    for i in range(ho):
        for j in range(wo):
            window = xp[:, :, i * stride : i * stride + hh, j * stride : j * stride + ww]
            out[:, :, i, j] = np.tensordot(window, w, axes=((1, 2, 3), (1, 2, 3))) + b
    return out, (x, w, b, conv_param)


def conv_backward_naive(dout, cache):
    x, w, b, conv_param = cache
    stride, pad = conv_param["stride"], conv_param["pad"]
    _, _, hh, ww = w.shape
    xp = np.pad(x, ((0, 0), (0, 0), (pad, pad), (pad, pad)))
    dxp, dw, db = np.zeros_like(xp), np.zeros_like(w), dout.sum(axis=(0, 2, 3))
    for i in range(dout.shape[2]):
        for j in range(dout.shape[3]):
            rows, columns = slice(i * stride, i * stride + hh), slice(j * stride, j * stride + ww)
            dxp[:, :, rows, columns] += np.tensordot(dout[:, :, i, j], w, axes=(1, 0))
            dw += np.tensordot(dout[:, :, i, j], xp[:, :, rows, columns], axes=(0, 0))
    return dxp[:, :, pad:-pad, pad:-pad], dw, db


def im2col_indices(shape, field, stride):
    _, c, h, w = shape
    oh, ow = (h - field) // stride + 1, (w - field) // stride + 1
    i0 = np.tile(np.repeat(np.arange(field), field), c)
    i = i0.reshape(-1, 1) + stride * np.repeat(np.arange(oh), ow).reshape(1, -1)
    j = np.tile(np.arange(field), field * c).reshape(-1, 1) + stride * np.tile(np.arange(ow), oh).reshape(1, -1)
    return np.repeat(np.arange(c), field * field).reshape(-1, 1), i, j, oh, ow


def conv_im2col_forward(x, w):
    k, i, j, oh, ow = im2col_indices(x.shape, w.shape[2], 1)
    cols = x[:, k, i, j]
    out = (w.reshape(len(w), -1) @ cols).reshape(len(x), len(w), oh, ow)
    return out, (x.shape, w, cols, (k, i, j))


def conv_im2col_backward(dout, cache):
    shape, w, cols, (k, i, j) = cache
    d = dout.reshape(len(dout), len(w), -1)
    dw = np.einsum("nfp,nkp->fk", d, cols).reshape(w.shape)
    dx = np.zeros(shape)
    np.add.at(dx, (slice(None), k, i, j), w.reshape(len(w), -1).T @ d)
    return dx, dw


def max_pool_forward(x, size=2):
    n, c, h, w = x.shape
    windows = x.reshape(n, c, h // size, size, w // size, size)
    out = windows.max(axis=(3, 5))
    return out, (x, out, size)


def max_pool_backward(dout, cache):
    x, out, size = cache
    big = out.repeat(size, axis=2).repeat(size, axis=3)
    return (x == big) * dout.repeat(size, axis=2).repeat(size, axis=3)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def lstm_step_forward(x, prev_h, prev_c, Wx, Wh, b):
    a = x.dot(Wx) + prev_h.dot(Wh) + b
    ai, af, ao, ag = np.split(a, 4, axis=1)
    i, f, o, g = sigmoid(ai), sigmoid(af), sigmoid(ao), np.tanh(ag)
    next_c = f * prev_c + i * g
    tanh_c = np.tanh(next_c)
    next_h = o * tanh_c
    return next_h, next_c, (x, prev_h, prev_c, Wx, Wh, i, f, o, g, tanh_c)


def lstm_step_backward(dnext_h, dnext_c, cache):
    x, prev_h, prev_c, Wx, Wh, i, f, o, g, tanh_c = cache
    dnext_c = dnext_c + dnext_h * o * (1 - tanh_c**2)
    di, df, do, dg = dnext_c * g, dnext_c * prev_c, dnext_h * tanh_c, dnext_c * i
    da = np.hstack((di * i * (1 - i), df * f * (1 - f), do * o * (1 - o), dg * (1 - g**2)))
    return da.dot(Wx.T), da.dot(Wh.T), dnext_c * f, x.T.dot(da), prev_h.T.dot(da), da.sum(axis=0)


def lstm_forward(x, h0, Wx, Wh, b):
    h, c, caches = h0, np.zeros_like(h0), []
    hs = np.zeros((x.shape[0], x.shape[1], h0.shape[1]))
    for t in range(x.shape[1]):
        h, c, cache = lstm_step_forward(x[:, t], h, c, Wx, Wh, b)
        hs[:, t] = h
        caches.append(cache)
    return hs, caches


def lstm_backward(dh, caches):
    dx = np.zeros(dh.shape[:2] + caches[0][0].shape[1:])
    dprev_h, dprev_c = np.zeros_like(dh[:, 0]), np.zeros_like(dh[:, 0])
    dWx, dWh, db = 0, 0, 0
    while caches:
        cache = caches.pop()
        t = len(caches)
        dx[:, t], dprev_h, dprev_c, wx, wh, bias = lstm_step_backward(dh[:, t] + dprev_h, dprev_c, cache)
        dWx, dWh, db = dWx + wx, dWh + wh, db + bias
    return dx, dprev_h, dWx, dWh, db


# Functions of a loss for an optimizer: the loss and the gradient in one.


def logistic_regression(w, x, y, strength=0.1):
    z = y * (x @ w)
    loss = np.log1p(np.exp(-z)).sum() + 0.5 * strength * w @ w
    grad = x.T @ (-y * sigmoid(-z)) + strength * w
    return loss, grad


def rosenbrock(x):
    f = sum(100 * (x[i + 1] - x[i] ** 2) ** 2 + (1 - x[i]) ** 2 for i in range(len(x) - 1))
    g = np.zeros(len(x))
    for i in range(len(x) - 1):
        g[i] += -400 * x[i] * (x[i + 1] - x[i] ** 2) - 2 * (1 - x[i])
        g[i + 1] += 200 * (x[i + 1] - x[i] ** 2)
    return float(f), g


def char_rnn_loss(inputs, targets, hprev, Wxh, Whh, Why):  # was: lossFun(inputs, targets, hprev)
    """Karpathy's min-char-rnn, whose weights were globals."""
    vocab_size = Wxh.shape[1]
    xs, hs, ps = {}, {-1: np.copy(hprev)}, {}
    loss = 0
    for t in range(len(inputs)):
        xs[t] = np.zeros((vocab_size, 1))
        xs[t][inputs[t]] = 1
        hs[t] = np.tanh(np.dot(Wxh, xs[t]) + np.dot(Whh, hs[t - 1]))
        y = np.dot(Why, hs[t])
        ps[t] = np.exp(y) / np.sum(np.exp(y))
        loss += -np.log(ps[t][targets[t], 0])
    dWxh, dWhh, dWhy = np.zeros_like(Wxh), np.zeros_like(Whh), np.zeros_like(Why)
    dhnext = np.zeros_like(hs[0])
    for t in reversed(range(len(inputs))):
        dy = np.copy(ps[t])
        dy[targets[t]] -= 1
        dWhy += np.dot(dy, hs[t].T)
        dhraw = (1 - hs[t] * hs[t]) * (np.dot(Why.T, dy) + dhnext)
        dWxh += np.dot(dhraw, xs[t].T)
        dWhh += np.dot(dhraw, hs[t - 1].T)
        dhnext = np.dot(Whh.T, dhraw)
    return loss, [dhnext, dWxh, dWhh, dWhy]  # was: return loss, dWxh, dWhh, dWhy, hs[len(inputs) - 1]


def ctc_loss(params, seq, blank=0):
    """After stanford-ctc: params are logits, (letters, time)."""
    probs = np.exp(params - params.max(axis=0))
    probs /= probs.sum(axis=0)
    length, time = 2 * len(seq) + 1, params.shape[1]
    letters = [blank if s % 2 == 0 else seq[s // 2] for s in range(length)]
    alphas, betas = np.zeros((length, time)), np.zeros((length, time))

    def walk(table, order, times, first):
        previous = None
        for t in times:
            for place, s in enumerate(order):
                if previous is None:
                    table[s, t] = probs[letters[s], t] if place < 2 else 0
                    continue
                total = table[s, previous] + (table[order[place - 1], previous] if place else 0)
                if place > 1 and letters[s] != blank and letters[s] != letters[order[place - 2]]:
                    total += table[order[place - 2], previous]
                table[s, t] = total * probs[letters[s], t]
            previous = t

    walk(alphas, list(range(length)), range(time), 0)
    walk(betas, list(range(length))[::-1], range(time)[::-1], 0)
    likelihood = alphas[-1, -1] + alphas[-2, -1]
    ab = alphas * betas
    grad = np.zeros_like(probs)
    for s in range(length):
        grad[letters[s]] += ab[s] / probs[letters[s]]
    return -np.log(likelihood), probs - grad / likelihood / 1.0


def soft_dtw(d, gamma):
    """Cuturi and Blondel, 2017, on a matrix of distances."""
    n, m = d.shape
    r = np.full((n + 2, m + 2), np.inf)
    r[0, 0] = 0
    for i in range(1, n + 1):
        for j in range(1, m + 1):
            before = -np.array([r[i - 1, j], r[i - 1, j - 1], r[i, j - 1]]) / gamma
            top = before.max()
            r[i, j] = d[i - 1, j - 1] - gamma * (np.log(np.exp(before - top).sum()) + top)
    value = r[n, m]
    dd = np.zeros((n + 2, m + 2))
    dd[1:-1, 1:-1] = d
    e = np.zeros((n + 2, m + 2))
    e[-1, -1] = 1
    r[:, -1], r[-1, :] = -np.inf, -np.inf
    r[-1, -1] = value
    for j in range(m, 0, -1):
        for i in range(n, 0, -1):
            a = np.exp((r[i + 1, j] - r[i, j] - dd[i + 1, j]) / gamma)
            b = np.exp((r[i, j + 1] - r[i, j] - dd[i, j + 1]) / gamma)
            c = np.exp((r[i + 1, j + 1] - r[i, j] - dd[i + 1, j + 1]) / gamma)
            e[i, j] = e[i + 1, j] * a + e[i, j + 1] * b + e[i + 1, j + 1] * c
    return value, e[1:-1, 1:-1]


# Classes with state.


class Dense:
    def __init__(self, n_in, n_out):
        rng = np.random.RandomState(0)
        self.W = rng.randn(n_in, n_out) * 0.1
        self.b = np.zeros(n_out)

    def forward(self, x):
        self.x = x
        return x @ self.W + self.b

    def backward(self, grad):
        self.dW = self.x.T @ grad
        self.db = grad.sum(axis=0)
        return grad @ self.W.T


class Tanh:
    def forward(self, x):
        self.out = np.tanh(x)
        return self.out

    def backward(self, grad):
        return grad * (1 - self.out**2)


class Sequential:
    def __init__(self, *layers):
        self.layers = layers

    def forward(self, x):
        for layer in self.layers:
            x = layer.forward(x)
        return x

    def backward(self, grad):
        for layer in reversed(self.layers):
            grad = layer.backward(grad)
        return grad


class TwoLayerNet:
    def __init__(self, d, hidden, classes, reg=0.1):
        rng = np.random.RandomState(1)
        self.reg = reg
        self.params = {"W1": rng.randn(d, hidden), "b1": np.zeros(hidden), "W2": rng.randn(hidden, classes)}

    def loss(self, x, y):
        p = self.params
        h = np.maximum(0, x @ p["W1"] + p["b1"])
        loss, dscores = softmax_loss(h @ p["W2"], y)
        loss += 0.5 * self.reg * (np.sum(p["W1"] ** 2) + np.sum(p["W2"] ** 2))
        dh = dscores @ p["W2"].T * (h > 0)
        grads = {"W2": h.T @ dscores + self.reg * p["W2"], "W1": x.T @ dh + self.reg * p["W1"], "b1": dh.sum(0)}
        return loss, grads


class GRUCell:
    def __init__(self, weights):
        self.Wz, self.Wr, self.Wh = weights

    def __call__(self, x, h):
        self.x, self.h, xh = x, h, np.hstack([x, h])
        self.z, self.r = sigmoid(xh @ self.Wz), sigmoid(xh @ self.Wr)
        self.c = np.tanh(np.hstack([x, self.r * h]) @ self.Wh)
        return (1 - self.z) * h + self.z * self.c

    def backward(self, d):
        n = self.x.shape[1]
        dc, dz, dh = d * self.z * (1 - self.c**2), d * (self.c - self.h) * self.z * (1 - self.z), d * (1 - self.z)
        inner = dc @ self.Wh.T
        dr = inner[:, n:] * self.h * self.r * (1 - self.r)
        outer = dz @ self.Wz.T + dr @ self.Wr.T
        dh += inner[:, n:] * self.r + outer[:, n:]
        return inner[:, :n] + outer[:, :n], dh


class Value:
    """micrograd."""

    def __init__(self, data, children=(), backward=lambda: None):
        self.data, self.grad, self._prev, self._backward = data, 0.0, children, backward

    def __add__(self, other):
        out = Value(self.data + other.data, (self, other))

        def backward():
            self.grad += out.grad
            other.grad += out.grad

        out._backward = backward
        return out

    def __mul__(self, other):
        out = Value(self.data * other.data, (self, other))

        def backward():
            self.grad += other.data * out.grad
            other.grad += self.data * out.grad

        out._backward = backward
        return out

    def tanh(self):
        t = np.tanh(self.data)
        out = Value(t, (self,))

        def backward():
            self.grad += (1 - t**2) * out.grad

        out._backward = backward
        return out

    def backward(self):
        topo, visited = [], set()

        def build(v):
            if v not in visited:
                visited.add(v)
                for child in v._prev:
                    build(child)
                topo.append(v)

        build(self)
        self.grad = 1.0
        for v in reversed(topo):
            v._backward()


def neuron(values):
    return (values[0] * values[1] + values[2] * values[1] + values[0]).tanh()


# Mathematics.


def layer_norm(x, g, b):
    mu, sigma = x.mean(-1, keepdims=True), x.std(-1, keepdims=True)
    n = (x - mu) / sigma
    return g * n + b, (n, sigma, g)


def layer_norm_grad(dy, cache):
    n, sigma, g = cache
    dn = dy * g
    dx = (dn - dn.mean(-1, keepdims=True) - n * (dn * n).mean(-1, keepdims=True)) / sigma
    return dx, (dy * n).reshape(-1, len(g)).sum(0), dy.reshape(-1, dy.shape[-1]).sum(0)


def attention(x, weights, heads=2):
    """Multi-head self-attention; weights: a dict."""
    t, d = x.shape
    q, k, v = (np.reshape(x @ weights[n], (t, heads, -1)).transpose(1, 0, 2) for n in ("q", "k", "v"))
    s = q @ k.transpose(0, 2, 1) / np.sqrt(d // heads)
    s[:, np.triu(np.ones((t, t)), 1) == 1] = -1e9
    a = np.exp(s - s.max(-1, keepdims=True))
    a = a / a.sum(-1, keepdims=True)
    o = (a @ v).transpose(1, 0, 2).reshape(t, d)
    return o @ weights["o"], (x, weights, q, k, v, a, o)


def attention_grad(dy, cache):
    x, weights, q, k, v, a, o = cache
    heads, t, size = q.shape
    do = (dy @ weights["o"].T).reshape(t, heads, size).transpose(1, 0, 2)
    da = do @ v.transpose(0, 2, 1)
    ds = a * (da - (da * a).sum(-1, keepdims=True)) / np.sqrt(size)
    parts = {"q": ds @ k, "k": ds.transpose(0, 2, 1) @ q, "v": a.transpose(0, 2, 1) @ do}
    flat = {n: g.transpose(1, 0, 2).reshape(t, -1) for n, g in parts.items()}
    dw = {n: x.T @ g for n, g in flat.items()}
    dw["o"] = o.T @ dy
    return sum(g @ weights[n].T for n, g in flat.items()), dw


def embed(ids, table):
    return table[ids], (ids, table.shape)


def embed_grad(dy, cache):
    ids, shape = cache
    d = np.zeros(shape)
    np.add.at(d, ids, dy)
    return d


def logsumexp(x):
    m = x.max()
    return m + np.log(np.exp(x - m).sum())


def gelu(x):
    u = np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)
    return 0.5 * x * (1 + np.tanh(u)), x


def gelu_grad(dy, x):
    t = np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))
    return dy * (0.5 * (1 + t) + 0.5 * x * (1 - t**2) * np.sqrt(2 / np.pi) * (1 + 3 * 0.044715 * x**2))


def triplet_loss(a, p, n, margin=0.5):
    loss = max(0.0, ((a - p) ** 2).sum() - ((a - n) ** 2).sum() + margin)
    return loss, ((2 * (n - p), 2 * (p - a), 2 * (a - n)) if loss > 0 else (0 * a, 0 * p, 0 * n))


def cosine_similarity(u, v):
    nu, nv = np.linalg.norm(u), np.linalg.norm(v)
    c = np.dot(u, v) / (nu * nv)
    return c, (v / (nu * nv) - c * u / nu**2, u / (nu * nv) - c * v / nv**2)


def vae_loss(mu, logvar, eps):
    z = mu + np.exp(0.5 * logvar) * eps
    kl = -0.5 * np.sum(1 + logvar - mu**2 - np.exp(logvar))
    return [z, kl], (mu, logvar, eps)


def vae_loss_grad(grads, cache):
    (dz, dkl), (mu, logvar, eps) = grads, cache
    dmu = dz + dkl * mu
    dlogvar = dz * 0.5 * np.exp(0.5 * logvar) * eps - 0.5 * dkl * (1 - np.exp(logvar))
    return [dmu, dlogvar, dz * np.exp(0.5 * logvar)]


def cholesky(a):
    low = np.linalg.cholesky(a)
    return low, low


def cholesky_grad(dlow, low):
    p = np.tril(low.T @ dlow)
    p[np.diag_indices(len(p))] /= 2
    inv = np.linalg.inv(low)
    s = inv.T @ p @ inv
    return (s + s.T) / 2


def log_likelihood(cov, y):
    """Of a Gaussian process."""
    inv = np.linalg.inv(cov)
    alpha = inv @ y
    value = -0.5 * y @ alpha - 0.5 * np.linalg.slogdet(cov)[1]
    return value, 0.5 * (np.outer(alpha, alpha) - inv)


def inverse(a):
    y = np.linalg.inv(a)
    return y, y


def eigenvalues(a):
    return np.linalg.eigh(a)


def power_spectrum(x):
    f = np.fft.fft(x)
    return np.abs(f) ** 2, f


def circular_convolution(x, k):
    fx, fk = np.fft.fft(x), np.fft.fft(k)
    return np.fft.ifft(fx * fk).real, (fx, fk)


def binarize(x):
    """A straight-through estimator."""
    return np.sign(x), x


def binarize_grad(dy, x):
    return dy * (np.abs(x) < 1)


def grid_sample(image, where):
    """Bilinear; where: (points, 2), inside the image."""
    i = np.floor(where).astype(int)
    f = where - i
    total, parts = 0, []
    for a in (0, 1):
        for b in (0, 1):
            wa, wb = (f[:, 0] if a else 1 - f[:, 0]), (f[:, 1] if b else 1 - f[:, 1])
            pixel = image[i[:, 0] + a, i[:, 1] + b]
            total = total + wa * wb * pixel
            parts.append((a, b, wa, wb, pixel))
    return total, (image.shape, i, parts)


def grid_sample_grad(dy, cache):
    shape, i, parts = cache
    dimage, dwhere = np.zeros(shape), np.zeros((len(dy), 2))
    for a, b, wa, wb, pixel in parts:
        np.add.at(dimage, (i[:, 0] + a, i[:, 1] + b), dy * wa * wb)
        dwhere[:, 0] += dy * pixel * wb * (1 if a else -1)
        dwhere[:, 1] += dy * pixel * wa * (1 if b else -1)
    return dimage, dwhere
