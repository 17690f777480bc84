"""Autograd on sizes: what a stretch of a model holds while it runs forward and backward, operation by operation.

A `Value` stands for a tensor and knows its bytes per token, no more. Operations keep for backward what torch's keep, and
allocate in both directions what torch's allocate; memory is given back when the last name of it goes, as in Python. So a
block written down in the operations of its transformers class yields its bytes at every moment, with or without
recomputation, in microseconds and without torch.

Bytes are per token of the micro-batch; gradients of parameters are absolute. Single values a row of a few tokens (means,
log-sums) are counted where backward keeps them and left out where they pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

Point = tuple[int, int]  # bytes per token of activations, bytes of parameters' gradients
Rule = Callable[["Node", "Store"], Sequence["Store | None"]]


class Store:
    """Memory of ``size`` bytes per token, there as long as something names it."""

    __slots__ = ("size", "tape")

    def __init__(self, tape: Tape, size: int) -> None:
        self.tape, self.size = tape, size
        tape.now += size
        tape.points.append((tape.now, tape.gradients))

    def __del__(self) -> None:
        self.tape.now -= self.size


class Node:
    """How a value was made: `rule` turns its gradient into those of the nodes at its `edges`."""

    __slots__ = ("edges", "frame", "grad", "rule", "saved")

    def __init__(self, edges: Sequence[Node | None], rule: Rule | None = None) -> None:
        self.edges, self.rule = edges, rule
        self.saved: tuple[Value, ...] = ()
        self.grad: Store | None = None
        self.frame: _Frame | None = None


class Value:
    """A tensor of `width` elements per token, each of `item` bytes. node: None where it needs no gradient."""

    __slots__ = ("item", "node", "store", "width")

    def __init__(self, store: Store, width: int, item: int, node: Node | None) -> None:
        self.store, self.width, self.item, self.node = store, width, item, node

    @property
    def size(self) -> int:
        return self.width * self.item


class _Frame:
    """One checkpointed call: its arguments, its nodes that keep something, and the products that it keeps."""

    def __init__(self, call: Callable[[Value], Value], given: Value, matrices: int | None) -> None:
        self.call, self.given, self.matrices = call, given, matrices
        self.nodes: list[Node] = []
        self.again: list[tuple[Value, ...]] = []
        self.replays = False
        self.cache: list[Store] = []
        self.products = 0


class _Enough(Exception):
    """Recomputation has made the last value that backward asks for."""


class Tape:
    """now: bytes per token at this moment. points: what was there after each allocation.

    item: bytes of the compute dtype. held: whether parameters' gradients stay until the engine takes them, or are taken
    one by one.
    """

    def __init__(self, item: int, held: bool = True) -> None:
        self.item, self.held = item, held
        self.now = self.gradients = 0
        self.points: list[Point] = []
        self._nodes: list[Node] = []
        self._frame: _Frame | None = None
        self._passing = 0  # gradients of the node that runs

    # -- running --------------------------------------------------------------------------------------------------

    def given(self, width: int, needs: bool = True) -> Value:
        """What enters: a value of the compute dtype."""
        return Value(Store(self, width * self.item), width, self.item, Node(()) if needs else None)

    def checkpoint(self, call: Callable[[Value], Value], given: Value, products: int | None = None) -> Value:
        """call(given) that keeps its argument alone; with `products`, the number of the call's matrices, also all attention
        and every second product, counted so that the last one is not kept."""
        frame = self._frame = _Frame(call, given, products)
        try:
            return call(given)
        finally:
            self._frame = None
            if given.node is None and not frame.nodes:
                frame.cache.clear()

    def backward(self, end: Node, size: int) -> None:
        """Runs back from a gradient of `size` bytes for the value that `end` made; the gradients of what was given stay in
        their nodes."""
        end.grad = self.new(size)
        for node in reversed(self._nodes):
            if node.grad is not None:
                self._run(node)
        self._nodes.clear()

    def _run(self, node: Node) -> None:
        assert node.rule is not None
        assert node.grad is not None
        if node.frame is not None and not node.frame.replays:
            self._replay(node.frame)
        grads = list(node.rule(node, node.grad))
        node.grad, node.saved, node.frame = None, (), None
        if not self.held:
            self.gradients -= self._passing
        self._passing = 0
        for edge in node.edges:
            grad = grads.pop(0)
            if edge is not None and grad is not None:
                edge.grad = grad if edge.grad is None else self._sum(edge.grad, grad)
            del grad

    def _sum(self, one: Store, other: Store) -> Store:
        return self.new(max(one.size, other.size))

    def _replay(self, frame: _Frame) -> None:
        """Recomputes a checkpointed call as far as backward needs it."""
        frame.replays, frame.products = True, 0
        nodes, self._nodes, self._frame = self._nodes, [], frame
        try:
            frame.call(frame.given)
        except _Enough:
            pass
        finally:
            self._nodes, self._frame = nodes, None
        for node, saved in zip(frame.nodes, frame.again, strict=True):
            node.saved = saved
        frame.nodes, frame.again = [], []  # its argument stays until the last of its nodes has run

    # -- what operations are made of ------------------------------------------------------------------------------

    def new(self, size: int) -> Store:
        return Store(self, size)

    def gradient(self, count: int, item: int = 0) -> None:
        """The gradient of a parameter of so many elements arrives."""
        self.gradients += count * (item or self.item)
        self._passing += count * (item or self.item)
        self.points.append((self.now, self.gradients))

    def record(self, inputs: Sequence[Value], rule: Rule, trains: bool = False) -> Node | None:
        """The node of an operation, or None where no gradient passes. trains: it has a parameter that does."""
        edges = [value.node for value in inputs]
        if not trains and all(edge is None for edge in edges):
            return None
        node = Node(edges, rule)
        self._nodes.append(node)
        return node

    def keep(self, node: Node | None, *values: Value) -> None:
        """Keeps values for the backward of `node`."""
        values = tuple(value for value in values)
        if node is None or not values:
            return
        frame = self._frame
        if frame is None:
            node.saved = values
        elif not frame.replays:
            node.frame = frame
            frame.nodes.append(node)
        else:
            frame.again.append(values)
            if len(frame.again) == len(frame.nodes):
                raise _Enough

    def made(self, width: int, item: int, node: Node | None, kept_by_selective: bool = False) -> Value:
        """The result of an operation."""
        frame = self._frame
        if frame is None or frame.matrices is None or not kept_by_selective:
            return Value(self.new(width * item), width, item, node)
        if frame.replays:
            return Value(frame.cache.pop(0), width, item, node)
        store = self.new(width * item)
        frame.cache.append(store)
        return Value(store, width, item, node)

    def every_second(self) -> bool:
        """Whether selective checkpointing keeps the product that comes now."""
        if self._frame is None or self._frame.matrices is None:
            return False
        self._frame.products += 1
        return self._frame.products % 2 != self._frame.matrices % 2

    # -- operations -----------------------------------------------------------------------------------------------

    def apply(self, x: Value, width: int = 0, item: int = 0, keeps: bool = False, grads: int = 1) -> Value:
        """An elementwise function of one value; `keeps` its argument for backward. grads: buffers its backward makes."""
        size = x.size

        def rule(node: Node, grad: Store) -> list[Store]:
            made = [self.new(size) for _ in range(grads)]
            return made[-1:]

        node = self.record([x], rule)
        if keeps:
            self.keep(node, x)
        return self.made(width or x.width, item or x.item, node)

    def keeping_result(self, x: Value, width: int = 0, item: int = 0) -> Value:
        """As `apply`, of a function whose backward reads its result: tanh, softmax, a reciprocal root."""
        size = x.size
        node = self.record([x], lambda node, grad: [self.new(size)])
        out = self.made(width or x.width, item or x.item, node)
        self.keep(node, Value(out.store, out.width, out.item, None))
        return out

    def to(self, x: Value, item: int) -> Value:
        """A cast; nothing where it is of that dtype already."""
        return x if x.item == item else self.apply(x, item=item)

    def linear(self, x: Value, width: int, count: int, trains: bool = True, bias: int = 0) -> Value:
        """A product with a parameter of `count` elements, and perhaps a bias of so many."""
        size, item = x.size, self.item
        inputs = x.node is not None

        def rule(node: Node, grad: Store) -> list[Store | None]:
            back = self.new(size) if inputs and bias else None
            if trains:
                self.gradient(count)
            if inputs and not bias:
                back = self.new(size)
            if bias and trains:
                self.gradient(bias)
            return [back]

        node = self.record([x], rule, trains)
        if trains:
            self.keep(node, x)
        return self.made(width, item, node, self.every_second())

    def add(self, a: Value, b: Value) -> Value:
        """A sum: both sides get the same gradient."""
        node = self.record([a, b], lambda node, grad: [grad, grad])
        return self.made(max(a.width, b.width), max(a.item, b.item), node)

    def mul(self, a: Value, b: Value) -> Value:
        """A product, element by element; b may have fewer elements, one for each run of those of `a`: its gradient is then
        summed. Of two dtypes the wider one is the result's, and the gradients' until they are cast back."""
        size, small, reduced = a.size, b.size, b.width != a.width
        item = max(a.item, b.item)
        wide = a.width * item

        def rule(node: Node, grad: Store) -> list[Store | None]:
            first, second = node.edges
            ours = self.new(wide) if first is not None else None
            theirs = self.new(wide) if second is not None else None
            if theirs is not None and reduced:
                theirs = self.new(small)
            if ours is not None and wide != size:
                ours = self.new(size)
            return [ours, theirs]

        node = self.record([a, b], rule)
        self.keep(node, *(v for v, other in ((a, b), (b, a)) if other.node is not None))
        return self.made(a.width, item, node)

    def scale(self, x: Value, count: int, trains: bool = True, item: int = 0) -> Value:
        """A product with a parameter of one element a column. item: bytes of the result, where they differ."""
        size, passes = x.size, x.node is not None

        def rule(node: Node, grad: Store) -> list[Store | None]:
            back = self.new(size) if passes else None
            if trains:
                passing = self.new(size)
                self.gradient(count)
                del passing
            return [back]

        node = self.record([x], rule, trains)
        if trains:
            self.keep(node, x)
        return self.made(x.width, item or x.item, node)

    def cat(self, *values: Value) -> Value:
        """Values end to end; backward cuts without a copy."""
        parts = len(values)
        node = self.record(values, lambda node, grad: [grad] * parts)
        return self.made(sum(v.width for v in values), values[0].item, node)

    def cut(self, x: Value, width: int) -> Value:
        """A slice, which lies in the memory of x; its gradient is laid into zeros of the whole."""
        size = x.size
        node = self.record([x], lambda node, grad: [self.new(size)])
        return Value(x.store, width, x.item, node)

    def split(self, x: Value, *widths: int) -> list[Value]:
        """Neighbouring pieces in the memory of x, cut in one operation: their gradients are laid end to end at once."""
        size, parts = x.size, len(widths)
        whole = self.record([x], lambda node, grad: [self.new(size)])
        if whole is None:
            return [Value(x.store, width, x.item, None) for width in widths]
        arrived: list[Store] = []

        def piece(node: Node, grad: Store) -> list[Store | None]:
            arrived.append(grad)
            if len(arrived) < parts:
                return [None]
            done = [self.new(size)]
            arrived.clear()
            return [done[0]]

        whole.rule = lambda node, grad: [grad]
        nodes = [self.record([Value(x.store, 0, x.item, whole)], piece) for _ in widths]
        return [Value(x.store, width, x.item, node) for width, node in zip(widths, nodes, strict=True)]

    def copied(self, x: Value) -> Value:
        """A copy in another order, or with a constant added: what backward hands on as it came."""
        node = self.record([x], lambda node, grad: [grad])
        return self.made(x.width, x.item, node)

    def copied_back(self, x: Value) -> Value:
        """A view whose gradient comes back in another order and is copied."""
        size = x.size
        node = self.record([x], lambda node, grad: [self.new(size)])
        return Value(x.store, x.width, x.item, node)

    def repeat(self, x: Value, times: int) -> Value:
        """Each head once more for all that share it; backward sums them."""
        if times == 1:
            return x
        size = x.size
        node = self.record([x], lambda node, grad: [self.new(size)])
        return self.made(x.width * times, x.item, node)

    def table(self, width: int, counts: Sequence[int]) -> Value:
        """Rows looked up in tables of so many trainable elements, summed where there are several."""
        counts = tuple(counts)

        def rule(node: Node, grad: Store) -> list[Store]:
            for count in counts:
                self.gradient(count)
            return []

        return self.made(width, self.item, self.record([], rule, bool(counts)))

    def layer_norm(self, x: Value, count: int, trains: bool = True) -> Value:
        """torch's own, which keeps its input, a mean and a deviation."""
        size, passes = x.size, x.node is not None

        def rule(node: Node, grad: Store) -> list[Store | None]:
            back = self.new(size) if passes else None
            if trains:
                self.gradient(2 * count)
            return [back]

        node = self.record([x], rule, trains)
        out = self.made(x.width, x.item, node)
        sums = Value(self.new(2 * self.item), 2, self.item, None)
        self.keep(node, x, sums)
        return out

    def dropout(self, x: Value, fused: bool = True) -> Value:
        """Its result, and what backward multiplies by: one kernel keeps a byte an element (on a GPU), the plain way a mask
        of the dtype of x."""
        size, item = x.size, x.item
        node = self.record([x], lambda node, grad: [self.new(size)])
        noise = None if fused else Value(self.new(size), x.width, item, None)
        out = self.made(x.width, item, node)
        self.keep(node, noise or Value(self.new(x.width), x.width, 1, None))
        return out

    def attention(self, q: Value, k: Value, v: Value, heads: int, extra: int = 0) -> Value:
        """torch's fused kernel: keeps its arguments, its result, a log-sum a head, and `extra` bytes (its mask)."""
        sizes = [q.size, k.size, v.size]

        def rule(node: Node, grad: Store) -> list[Store | None]:
            return [self.new(size) for size in sizes]

        node = self.record([q, k, v], rule)
        mask = Value(self.new(extra), extra, 1, None) if extra else None
        out = self.made(q.width, q.item, node, True)
        sums = self.made(heads, 4, None, True)
        kept = [q, k, v, Value(out.store, out.width, out.item, None), sums]
        self.keep(node, *kept, *([mask] if mask is not None else []))
        return out
