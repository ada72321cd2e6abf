"""The network as samplers use it: random numbers, controls on the prediction, categorical draws, counted calls.

Shapes: B sequences, L positions, V vocabulary, n chosen positions of all sequences together. Only torch is needed.
"""

import torch


class Noise:
    """Uniform random numbers for B rows, one stream a row, so that a row never depends on its neighbours.

    Args:
        generator: one generator (None: torch's global one), or a list with one for each row. It is used once a row,
            to draw the seed of that row's own stream.
        num_rows: B.
        dtype: float64, or float32.
        device: where the numbers are wanted. They are drawn on the CPU: one seed gives the same text on any device.
    """

    def __init__(self, generator, num_rows: int, dtype: torch.dtype, device):
        sources = generator if isinstance(generator, (list, tuple)) else [generator] * num_rows
        self.dtype, self.device = dtype, device
        self.streams = [torch.Generator().manual_seed(self._seed(source)) for source in sources]

    @staticmethod
    def _seed(source: torch.Generator | None) -> int:
        device = "cpu" if source is None else source.device
        return torch.randint(2**63 - 1, (), generator=source, device=device).item()

    def positions(self, lengths: list[int], count: int) -> torch.Tensor:
        """`count` numbers in [0, 1) for each position of each row, [B, max(lengths), count]; 0 beyond a row's end."""
        out = torch.zeros(len(lengths), max(lengths), count, dtype=self.dtype)
        for row, (length, stream) in enumerate(zip(lengths, self.streams, strict=True)):
            torch.rand(length, count, generator=stream, dtype=self.dtype, out=out[row, :length])
        return out.to(self.device)

    def rows(self, count: int) -> torch.Tensor:
        """`count` numbers in [0, 1) for each row, [B, count]."""
        return self.positions([1] * len(self.streams), count)[:, 0]


def draw(weights: torch.Tensor, uniforms: torch.Tensor, block: int = 256) -> torch.Tensor:
    """Categorical draws by inverting the distribution function in the precision of `uniforms`.

    In two levels, first a block of the vocabulary and then a token in it, so that no [n, V] table of sums is needed.
    A weight of zero is never drawn, also for uniforms of 0 and 1 - eps.

    Args:
        weights: not negative, not all zero, of any sum, [n, V].
        uniforms: in [0, 1), [n].

    Returns:
        ids [n].
    """
    V = weights.shape[1]
    body = V - V % block
    sums = torch.cat([weights[:, :body].unflatten(1, (-1, block)).sum(-1), weights[:, body:].sum(-1, keepdim=True)], 1)
    sums = sums.to(uniforms.dtype)
    cdf = sums.cumsum(-1)
    target = uniforms[:, None] * cdf[:, -1:]
    chosen = torch.searchsorted(cdf, target, right=True).clamp_max(sums.shape[1] - 1)
    mass = sums.gather(1, chosen)
    below_one = 1 - torch.finfo(uniforms.dtype).eps / 2
    uniforms = ((target - cdf.gather(1, chosen) + mass) / mass).clamp(0, below_one)
    ids = chosen * block + torch.arange(block, device=weights.device)
    inside = weights.gather(1, ids.clamp_max(V - 1)).to(uniforms.dtype).masked_fill(ids >= V, 0)
    cdf = inside.cumsum(-1)
    return (chosen * block + torch.searchsorted(cdf, uniforms * cdf[:, -1:], right=True))[:, 0]


def control(logits: torch.Tensor, temperature: float, top_k: int, top_p: float) -> torch.Tensor:
    """Sharpen or truncate the clean-token prediction: temperature, then top_k, then top_p.

    Args:
        logits: [n, V].
        temperature: 1 changes nothing; 0 is greedy: all mass on the likeliest token.
        top_k: keep the k likeliest tokens; 0: all.
        top_p: keep the likeliest tokens up to and including the one at which their sum reaches p; 1: all.

    Returns:
        logits [n, V], -inf where a token is ruled out.
    """
    if temperature == 0 or top_k == 1:
        return torch.full_like(logits, -torch.inf).scatter_(-1, logits.argmax(-1, keepdim=True), 0.0)
    if temperature != 1:
        logits = logits / temperature
    if 0 < top_k < logits.shape[-1]:
        best = logits.topk(top_k, dim=-1)
        logits = torch.full_like(logits, -torch.inf).scatter_(-1, best.indices, best.values)
    if top_p < 1:
        ordered, order = logits.sort(dim=-1, descending=True, stable=True)
        before = ordered.double().softmax(-1).cumsum(-1).roll(1, -1)
        before[:, 0] = 0
        logits = torch.full_like(logits, -torch.inf).scatter_(
            -1, order, ordered.masked_fill(before >= top_p, -torch.inf)
        )
    return logits


def index_of(wanted: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A mask [B, L] -> the wanted positions of each row, [B, n], padded with others, and which of them are wanted."""
    counts = wanted.sum(1, keepdim=True)
    n = int(counts.max())
    positions = (~wanted).to(torch.uint8).argsort(dim=1, stable=True)[:, :n]
    return positions, torch.arange(n, device=wanted.device) < counts


class Denoiser:
    """Clean-token predictions at wanted positions, in chunks; the rest of the head is never computed.

    Args:
        model: called as `model(input_ids=, timesteps=, attention_mask=, positions=)`, see its `forward`.
        present: positions that exist, bool [B, L]; None: all.
        temperature, top_k, top_p: see `control`.
        dtype: in which probabilities and draws are computed. The exponentials keep the precision of the logits.
        chunk_size: positions for which logits [n, V] are held at once; None: 32 MiB of them (GPU: 512 MiB).

    Attributes:
        num_calls: network calls made. A batch too large for one call still counts as one: it is a number per row.
    """

    def __init__(self, model, present, *, temperature, top_k, top_p, dtype, chunk_size=None):
        self.model, self.present, self.dtype = model, present, dtype
        self.controls = (temperature, top_k, top_p)
        on_cpu = model.device.type == "cpu"
        elements = (2**23 if on_cpu else 2**27) // (4 if top_p < 1 else 1)  # sorting needs several copies
        self.chunk_size = chunk_size or max(1, elements // model.config.vocab_size)
        self.tokens_per_call = 2**10 if on_cpu else 2**16
        self.num_calls = 0

    def __call__(self, x: torch.Tensor, t: torch.Tensor, wanted: torch.Tensor, identical: bool = False):
        """One network call; none if nothing is wanted.

        Args:
            x: [B, L]. t: [B]. wanted: bool [B, L].
            identical: the rows of x, t and `present` are all alike, so that one of them serves all.

        Yields:
            rows [n], columns [n], weights [n, V] proportional to p(x_0 | x_t) there, and their sums [n].
        """
        active = wanted.any(1).nonzero()[:, 0]
        if not len(active):
            return
        self.num_calls += 1
        if identical:
            union = wanted.any(0)
            hidden, c = self._hidden(x, t, active[:1], union.nonzero().T)
            rows, columns = wanted.nonzero(as_tuple=True)
            yield from self._weights(rows, columns, hidden[0], (union.cumsum(0) - 1)[columns], c, rows * 0)
            return
        for part in active.split(max(1, self.tokens_per_call // x.shape[1])):
            positions, valid = index_of(wanted[part])
            hidden, c = self._hidden(x, t, part, positions)
            local = torch.arange(len(part), device=x.device)[:, None].expand_as(positions)[valid]
            hidden = hidden[valid]
            which = torch.arange(len(hidden), device=x.device)
            yield from self._weights(part[local], positions[valid], hidden, which, c, local)

    def _hidden(self, x, t, rows, positions):
        mask = None if self.present is None else self.present[rows]
        output = self.model(
            input_ids=x[rows], timesteps=t[rows], attention_mask=mask, positions=positions, return_dict=True
        )
        return output.hidden_states

    def _weights(self, rows, columns, hidden, hidden_row, c, c_row):
        for chunk in torch.arange(len(rows), device=rows.device).split(self.chunk_size):
            logits = self.model.logits(hidden[hidden_row[chunk], None], c[c_row[chunk]])[:, 0]
            logits = logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
            if hasattr(self.model.process, "mask_id"):
                logits[:, self.model.process.mask_id] = -torch.inf
            logits = control(logits, *self.controls)
            weights = logits.sub_(logits.amax(-1, keepdim=True)).exp_()
            yield rows[chunk], columns[chunk], weights, weights.sum(-1).to(self.dtype)
