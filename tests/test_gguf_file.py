"""Reading a .gguf file that the `gguf` package wrote, as models have them: formats mixed, rows of 640."""

from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

from pagebench.reference.dequant import dequantize
from pagebench.reference.dtypes import BFLOAT16, FLOAT16, FLOAT32
from pagebench.reference.gguf_file import FORMAT_OF, read_gguf

# name: type, shape. As in a Q4_K_M file of a model whose hidden size is 640 and whose feed-forward size is 2048.
TENSORS = {
    "token_embd.weight": (Kind.Q8_0, (300, 640)),
    "blk.0.attn_q.weight": (Kind.Q5_0, (96, 640)),
    "blk.0.attn_k.weight": (Kind.Q4_0, (33, 640)),
    "blk.0.attn_v.weight": (Kind.Q4_1, (7, 32)),
    "blk.0.ffn_down.weight": (Kind.Q6_K, (65, 2048)),
    "blk.0.ffn_up.weight": (Kind.Q4_K, (3, 256)),
    "blk.0.ffn_gate.weight": (Kind.Q5_K, (1, 768)),
    "blk.0.ffn_down_exps.weight": (Kind.Q4_K, (4, 5, 512)),
}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with TENSORS of random bytes, and tensors that are not packed, one of an odd size to shift the others."""
    found = tmp_path_factory.mktemp("gguf") / "model.gguf"
    writer = gguf.GGUFWriter(found, "llama")
    writer.add_block_count(1)
    rng = np.random.default_rng(0)
    writer.add_tensor("output_norm.weight", rng.standard_normal(37).astype(FLOAT32))
    for name, (kind, shape) in TENSORS.items():
        row = gguf.quant_shape_to_byte_shape(shape, kind)
        writer.add_tensor(name, rng.integers(0, 256, row, np.uint8), raw_dtype=kind)
    writer.add_tensor("rope.weight", rng.standard_normal((3, 5)).astype(FLOAT16))
    numbers = rng.standard_normal((5, 6)).astype(FLOAT32).astype(BFLOAT16)
    writer.add_tensor("scale.weight", numbers.view(np.uint8).reshape(5, 12), raw_dtype=Kind.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return found


def test_names_types_and_shapes(path: Path) -> None:
    tensors = read_gguf(path)
    found = {name: (each.type, each.shape) for name, each in tensors.items()}
    assert found == {
        "output_norm.weight": ("F32", (37,)),
        **{name: (kind.name, shape) for name, (kind, shape) in TENSORS.items()},
        "rope.weight": ("F16", (3, 5)),
        "scale.weight": ("BF16", (5, 6)),
    }


@pytest.mark.parametrize("name", TENSORS)
def test_packed_tensors(path: Path, name: str) -> None:
    """A problem of the whole tensor, experts folded into n, whose weights are those of `gguf`."""
    kind, shape = TENSORS[name]
    tensor = read_gguf(path)[name]
    what = tensor.problem(FLOAT32)
    assert what.format == FORMAT_OF[kind.name]
    assert what.shape == (int(np.prod(shape[:-1])), shape[-1])
    with np.errstate(all="ignore"):
        expected = gguf.quants.dequantize(tensor.data, kind).reshape(what.shape)
    np.testing.assert_array_equal(dequantize(what), expected)


def test_numbers(path: Path) -> None:
    tensors = read_gguf(path)
    rng = np.random.default_rng(0)
    np.testing.assert_array_equal(tensors["output_norm.weight"].data, rng.standard_normal(37).astype(FLOAT32))
    assert tensors["rope.weight"].data.dtype == FLOAT16
    assert tensors["scale.weight"].data.dtype == BFLOAT16
    assert tensors["scale.weight"].data.shape == (5, 6)


def test_the_problem_does_not_share_the_file(path: Path) -> None:
    tensor = read_gguf(path)["blk.0.attn_k.weight"]
    blocks = tensor.problem(FLOAT16).packed["blocks"]
    assert blocks.flags.writeable
    assert not np.shares_memory(blocks, tensor.data)
    assert not tensor.data.flags.writeable


def test_a_type_without_decoder_is_rejected(path: Path) -> None:
    with pytest.raises(ValueError, match=r"tensor must be of a type in .* got 'F16 \(rope.weight\)'"):
        read_gguf(path)["rope.weight"].problem(FLOAT16)


def test_there_must_be_a_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_gguf(tmp_path / "absent.gguf")


@pytest.mark.parametrize("kept", [0, 3, 20, 100, 400, -1])
def test_a_cut_file_is_rejected(path: Path, tmp_path: Path, kept: int) -> None:
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(path.read_bytes()[: kept if kept >= 0 else -100])
    with pytest.raises(ValueError, match="path must be a GGUF file"):
        read_gguf(cut)


def test_other_files_are_rejected(tmp_path: Path) -> None:
    other = tmp_path / "other.gguf"
    other.write_bytes(b"PK\3\4" + bytes(1000))
    with pytest.raises(ValueError, match="path must be a GGUF file"):
        read_gguf(other)


def test_big_endian_files_are_rejected(tmp_path: Path) -> None:
    found = tmp_path / "big.gguf"
    writer = gguf.GGUFWriter(found, "llama", endianess=gguf.GGUFEndian.BIG)
    writer.add_tensor("x", np.zeros((2, 32), FLOAT32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ValueError, match="little-endian"):
        read_gguf(found)
