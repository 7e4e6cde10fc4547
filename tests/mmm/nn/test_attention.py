"""Attention over packed documents, by each of its ways, is softmax by definition; and what travels to it."""

import itertools
import math

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from mmm.nn import attention
from mmm.nn.attention import Documents, causal_attention

SEQ = 11
# Of each sequence, where its documents begin; the second has fewer, and the third is one text.
BEGINS = ([0, 1, 5, 9], [0, 6], [0])


def start_of_token():
    rows = []
    for begins in BEGINS:
        row = [begin for begin, end in itertools.pairwise([*begins, SEQ]) for _ in range(begin, end)]
        rows.append(row)
    return torch.tensor(rows)


def by_definition(q, k, v, starts, window, scale=None):
    """Every query by itself: a softmax over the keys that it sees."""
    batch, heads, seq, head_dim = q.shape
    n_rep = heads // k.shape[1]
    scale = scale or 1 / math.sqrt(head_dim)
    out = torch.zeros_like(q)
    for sample, head, place in itertools.product(range(batch), range(heads), range(seq)):
        first = int(starts[sample, place])
        if window is not None:
            first = max(first, place - window + 1)
        seen = slice(first, place + 1)
        weights = (k[sample, head // n_rep, seen] @ q[sample, head, place] * scale).softmax(0)
        out[sample, head, place] = weights @ v[sample, head // n_rep, seen]
    return out


def stand_in(q, k, v, cu_seq_q, cu_seq_k, max_q, max_k, *, window_size, enable_gqa=False):
    """What PyTorch's page says of `varlen_attn`, in the order of its arguments."""
    assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
    assert cu_seq_q[0] == 0
    assert cu_seq_q[-1] == len(q)
    assert q.shape[1] == k.shape[1] or enable_gqa
    before, after = window_size
    assert after == 0
    out = []
    for begin, end in itertools.pairwise(cu_seq_q.tolist()):
        assert 0 <= end - begin <= min(max_q, max_k)
        one = (x[begin:end].transpose(0, 1)[None] for x in (q, k, v))
        starts = torch.zeros(1, end - begin, dtype=torch.int64)
        window = None if before == -1 else before + 1
        attended = by_definition(*one, starts, window)[0]
        out.append(attended.transpose(0, 1))
    return torch.cat(out)


def mask(q, k, v, documents, window, monkeypatch):
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    return causal_attention(q, k, v, documents, window)


def each(q, k, v, documents, window, monkeypatch):
    def no_mask(*args, attn_mask=None, **named):
        # A window, in a document that is longer.
        assert attn_mask is None or attn_mask.shape[-1] <= 6
        return sdpa(*args, attn_mask=attn_mask, **named)

    sdpa = torch.nn.functional.scaled_dot_product_attention
    documents_of_many = Documents(*(tensor[:2] for tensor in documents))
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", no_mask)
    causal_attention(q[:2], k[:2], v[:2], documents_of_many, window)
    monkeypatch.undo()
    return causal_attention(q, k, v, documents, window)


def one_kernel(q, k, v, documents, window, monkeypatch):
    monkeypatch.setattr(attention, "varlen_attn", stand_in)
    return attention.varlen_attention(q, k, v, documents, window)


def one_kernel_of_an_earlier_version(q, k, v, documents, window, monkeypatch):
    monkeypatch.setattr(attention, "VARLEN_ARGUMENTS", {"window_size"})
    return one_kernel(q, k, v, documents, window, monkeypatch)


@pytest.mark.parametrize("way", [mask, each, one_kernel, one_kernel_of_an_earlier_version])
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("window", [None, 1, 3, SEQ])
def test_documents(monkeypatch, way, kv_heads, window):
    rng = torch.Generator().manual_seed(0)
    shapes = [(3, heads, SEQ, 8) for heads in (4, kv_heads, kv_heads, 4)]
    *inputs, gradient = (torch.randn(shape, dtype=torch.float64, generator=rng) for shape in shapes)
    inputs = [tensor.requires_grad_() for tensor in inputs]
    expected = by_definition(*inputs, start_of_token(), window)
    out = way(*inputs, Documents.of(start_of_token()), window, monkeypatch)
    assert (out - expected).abs().max() <= 1e-14
    ours = torch.autograd.grad(out, inputs, gradient)
    for got, right in zip(ours, torch.autograd.grad(expected, inputs, gradient), strict=True):
        assert (got - right).abs().max() <= 1e-14


def test_varlen_attn_takes_these_arguments():
    """Its own checks, up to the kernel, which no CPU has."""
    if "enable_gqa" not in attention.VARLEN_ARGUMENTS:
        pytest.skip("this PyTorch cannot do it: heads are repeated, or documents make a mask")
    q = torch.zeros(6, 4, 8, device="meta")
    k = torch.zeros(6, 2, 8, device="meta")
    ends = torch.zeros(3, dtype=torch.int32, device="meta")
    assert attention.varlen_attn(q, k, k, ends, ends, 4, 4, window_size=(-1, 0), enable_gqa=True).shape == q.shape


def test_where_documents_are():
    documents = Documents.of(start_of_token())
    assert documents.starts.tolist() == [[0, 1, 5, 9], [0, 6, SEQ, SEQ], [0, SEQ, SEQ, SEQ]]
    assert documents.ends().tolist() == [0, 1, 5, 9, 11, 17, 22, 22, 22, 33, 33, 33, 33]
    assert documents.lengths() == [1, 4, 4, 2, 6, 5, 0, 0, 11, 0, 0, 0]
    # A document that has begun before its sequence is its first.
    assert Documents.of(torch.tensor([[-3, -3, 2, 2]])).starts.tolist() == [[0, 2]]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ([0, 0, 3, 3], "token 2 of sequence 1 .* begins at 3, .* begins at 0"),
        ([1, 1, 1, 1], "token 0 of sequence 1"),
        ([0, 1, 0, 0], "token 2 of sequence 1 .* begins at 0, .* begins at 1"),
    ],
    ids=str,
)
def test_tokens_that_are_in_no_document(row, message):
    with pytest.raises(ValueError, match=message):
        Documents.of(torch.tensor([[0, 0, 2, 2], row]))


def test_documents_are_split_as_tensors_are():
    documents = Documents.of(start_of_token())
    first, second = documents.tensor_split(2)
    assert first.lengths() == [1, 4, 4, 2, 6, 5, 0, 0]
    assert second.lengths() == [11, 0, 0, 0]
    assert torch.equal(second.start_of_token, start_of_token()[2:])


@pytest.mark.parametrize(
    ("device", "dtype", "head_dim", "major", "hip", "expected"),
    [
        ("cuda", torch.bfloat16, 64, 8, None, True),
        ("cuda", torch.float16, 128, 9, None, True),
        ("cuda", torch.float32, 64, 9, None, False),
        ("cuda", torch.bfloat16, 64, 7, None, False),
        ("cuda", torch.bfloat16, 60, 9, None, False),
        ("cuda", torch.bfloat16, 512, 9, None, False),
        ("cuda", torch.bfloat16, 64, 9, "7.0", False),
        ("xpu", torch.bfloat16, 64, 9, None, False),
        ("cpu", torch.bfloat16, 64, 9, None, False),
    ],
)
def test_which_devices_have_it(monkeypatch, device, dtype, head_dim, major, hip, expected):
    class Heads:
        shape = (1, 2, 3, head_dim)

    class Properties:
        pass

    q, properties = Heads(), Properties()
    q.device = torch.device(device)
    q.dtype = dtype
    properties.major = major
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(torch.version, "hip", hip)
    # As from 2.13 on, whatever PyTorch this is.
    monkeypatch.setattr(attention, "VARLEN_ARGUMENTS", {"window_size", "enable_gqa"})
    assert attention.has_varlen(q) is expected
    monkeypatch.setattr(attention, "VARLEN_ARGUMENTS", {"is_causal"})
    assert not attention.has_varlen(q)


def test_compiled_code_does_not_depend_on_how_many_documents_there_are():
    counter = CompileCounter()
    compiled = torch.compile(causal_attention, backend=counter)
    q, k, v = torch.randn(3, 3, 2, SEQ, 8, dtype=torch.float64)
    for starts in (start_of_token(), torch.zeros(3, SEQ, dtype=torch.int64), torch.arange(SEQ).repeat(3, 1)):
        documents = Documents.of(starts)
        assert (compiled(q, k, v, documents) - causal_attention(q, k, v, documents)).abs().max() <= 1e-14
    assert counter.frame_count == 1
