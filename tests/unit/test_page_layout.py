"""The page layout against sizes and bit positions written down independently."""

import pytest
import torch

from vllm_oscar.errors import ConfigError
from vllm_oscar.page_layout import ALIGNMENT, GROUP_SIZES, HEAD_SIZES, KEY, VALUE, PageLayout, pack, unpack

TOKEN_BYTES = {64: 40, 80: 48, 96: 56, 128: 72, 192: 104, 256: 136}  # whole head as one group
GROUPED_TOKEN_BYTES = {(64, 32): 48, (128, 64): 80, (128, 32): 96}
LAYOUTS = [(size, size) for size in TOKEN_BYTES] + list(GROUPED_TOKEN_BYTES)


def test_every_supported_size_is_listed_here() -> None:
    assert set(HEAD_SIZES) == set(TOKEN_BYTES)
    assert {(head, group) for head, groups in GROUP_SIZES.items() for group in groups} == set(GROUPED_TOKEN_BYTES)


@pytest.mark.parametrize(("head_size", "group_size"), LAYOUTS)
@pytest.mark.parametrize("block_size", [16, 32, 128])
def test_sizes_and_offsets(head_size: int, group_size: int, block_size: int) -> None:
    layout = PageLayout(head_size, block_size, group_size)
    token_bytes = GROUPED_TOKEN_BYTES.get((head_size, group_size), TOKEN_BYTES[head_size])
    groups = head_size // group_size
    assert layout.token_bytes == token_bytes
    assert (layout.groups, layout.units, layout.meta_bytes) == (groups, head_size // 8, 8 * groups)
    assert layout.value_codes_offset == block_size * head_size // 4
    assert layout.meta_offset == block_size * head_size // 2
    assert layout.head_bytes == layout.meta_offset + block_size * 8 * groups == block_size * token_bytes
    assert layout.page_bytes(3) == 3 * block_size * token_bytes
    assert layout.bits_per_element == pytest.approx(2 + 32 / group_size)
    assert layout.head_bytes % ALIGNMENT == layout.meta_offset % ALIGNMENT == layout.value_codes_offset % 64 == 0


def test_whole_head_is_the_default_group() -> None:
    assert PageLayout(128, 16) == PageLayout(128, 16, 128)
    assert PageLayout(80, 16).group_size == 80


def test_capacity_against_bf16() -> None:
    """The numbers of the design: 6.4x at head size 64, 7.1x at 128."""
    assert 2 * 2 * 64 / PageLayout(64, 16).token_bytes == pytest.approx(6.4)
    assert 2 * 2 * 128 / PageLayout(128, 16).token_bytes == pytest.approx(512 / 72)


# of whole-head groups: bytes of a token and KV head
DIALLED_TOKEN_BYTES = {
    (64, 3, 2): 48, (64, 4, 4): 72, (80, 3, 2): 58, (96, 4, 2): 80, (128, 2, 4): 104, (128, 3, 2): 88,
    (128, 3, 4): 120, (128, 4, 2): 104, (128, 4, 4): 136, (192, 3, 2): 128, (256, 4, 4): 264,
}  # fmt: skip


@pytest.mark.parametrize(("head_size", "key_bits", "value_bits"), DIALLED_TOKEN_BYTES)
def test_sizes_with_more_bits(head_size: int, key_bits: int, value_bits: int) -> None:
    layout = PageLayout(head_size, 64, 0, key_bits, value_bits)
    assert layout.token_bytes == DIALLED_TOKEN_BYTES[head_size, key_bits, value_bits]
    assert layout.bits_per_element == pytest.approx((key_bits + value_bits) / 2 + 32 / head_size)
    assert layout.value_codes_offset == 64 * head_size * key_bits // 8
    assert layout.meta_offset == 64 * head_size * (key_bits + value_bits) // 8
    assert layout.head_bytes == 64 * layout.token_bytes


@pytest.mark.parametrize("bits", [3, 4])
@pytest.mark.parametrize("head_size", [64, 80])
def test_units_of_three_and_four_bits(bits: int, head_size: int) -> None:
    """Unit u of 3 bits: codes 0 to 4 in a word, 5, 6 and two bits of 7 in a byte, the last bit in bit 15 of the word.
    Of 4 bits: codes 0 to 3 in one word, 4 to 7 in another."""
    codes = torch.randint(0, 1 << bits, (5, head_size), generator=torch.Generator().manual_seed(head_size))
    planes = pack(codes, bits)
    assert [plane.shape[-1] for plane in planes] == [head_size // 4, head_size // 8 * (bits - 2)]
    for row in range(5):
        first, rest = (bytes(plane[row].tolist()) for plane in planes)
        for unit in range(head_size // 8):
            word = int.from_bytes(first[2 * unit : 2 * unit + 2], "little")
            own = [int(codes[row, unit + head_size // 8 * j]) for j in range(8)]
            if bits == 3:
                whole = rest[unit] | word >> 15 << 8
                assert [word >> 3 * j & 7 for j in range(5)] + [whole >> 3 * j & 7 for j in range(3)] == own
            else:
                second = int.from_bytes(rest[2 * unit : 2 * unit + 2], "little")
                assert [half >> 4 * j & 15 for half in (word, second) for j in range(4)] == own
    assert torch.equal(unpack(planes), codes.to(torch.uint8))


@pytest.mark.parametrize("head_size", HEAD_SIZES)
def test_interleave_is_unit_u_channel_u_plus_eighth_j(head_size: int) -> None:
    """Unit u (little endian, 16 bits) holds channel u + (D/8) j at bits 2j and 2j + 1."""
    codes = torch.randint(0, 4, (5, head_size), generator=torch.Generator().manual_seed(head_size))
    (data,) = pack(codes, 2)
    assert data.shape == (5, head_size // 4)
    assert data.dtype == torch.uint8
    for row in range(5):
        raw = bytes(data[row].tolist())
        for unit in range(head_size // 8):
            word = int.from_bytes(raw[2 * unit : 2 * unit + 2], "little")
            for j in range(8):
                assert (word >> 2 * j) & 3 == codes[row, unit + head_size // 8 * j]


@pytest.mark.parametrize("head_size", HEAD_SIZES)
def test_unpack_inverts_pack_for_every_byte(head_size: int) -> None:
    data = torch.arange(256, dtype=torch.uint8)[:, None].expand(256, head_size // 4).contiguous()
    data[:, ::3] ^= 0x5A
    assert torch.equal(pack(unpack([data]), 2)[0], data)
    codes = torch.randint(0, 4, (2, 3, head_size), dtype=torch.uint8)
    assert torch.equal(unpack(pack(codes, 2)), codes)


@pytest.mark.parametrize(("head_size", "group_size"), [(128, 64), (128, 32), (64, 32)])
def test_groups_are_whole_positions(head_size: int, group_size: int) -> None:
    """A code in group g only ever sets bits of its own share of the eight positions."""
    positions = 8 * group_size // head_size
    for channel in range(head_size):
        codes = torch.zeros(head_size, dtype=torch.uint8)
        codes[channel] = 3
        words = pack(codes, 2)[0].view(torch.int16)
        (unit,) = words.nonzero().tolist()[0]
        bit = (int(words[unit]) & 0xFFFF).bit_length() - 1
        assert bit // 2 // positions == channel // group_size


def filled(layout: PageLayout, pages: torch.Tensor) -> dict[str, torch.Tensor]:
    """Write distinct values through the views; return what was written."""
    blocks, heads, p = *pages.shape[:2], layout.block_size
    generator = torch.Generator().manual_seed(1)
    views = layout.views(pages)
    content = {
        f"{which} {number}": torch.randint(0, 256, (blocks, heads, p, size), generator=generator, dtype=torch.uint8)
        for which in (KEY, VALUE)
        for number, size in enumerate(layout.plane_bytes(which))
    }
    for name, part in content.items():
        which, number = map(int, name.split())
        views.planes[which][number].copy_(part)
    content["meta"] = torch.randn(blocks, heads, p, 2, layout.groups, 2, generator=generator).half()
    views.meta.copy_(content["meta"])
    return content


def assert_holds(
    layout: PageLayout, region: torch.Tensor, content: dict[str, torch.Tensor], at: tuple[int, int]
) -> None:
    """The bytes of one head's region are the concatenation that the module's docstring draws."""
    expected = b"".join(part[at].contiguous().numpy().tobytes() for part in content.values())
    assert region[: layout.head_bytes].contiguous().numpy().tobytes() == expected


@pytest.mark.parametrize(("head_size", "group_size", "bits"), [
    *((*layout, (2, 2)) for layout in LAYOUTS), (64, 32, (3, 4)), (128, 128, (3, 2)), (96, 96, (4, 4)),
])  # fmt: skip
def test_views_are_the_bytes_of_the_page(head_size: int, group_size: int, bits: tuple[int, int]) -> None:
    layout = PageLayout(head_size, 16, group_size, *bits)
    pages = torch.zeros(3, 2, layout.head_bytes, dtype=torch.uint8)
    content = filled(layout, pages)
    for block in range(3):
        for head in range(2):
            assert_holds(layout, pages[block, head], content, (block, head))


@pytest.mark.parametrize("head_size", [64, 80, 128])
def test_views_follow_strides_and_leave_padding_alone(head_size: int) -> None:
    """Blocks padded, heads padded, heads outermost, and every second block of a larger tensor."""
    layout = PageLayout(head_size, 32)
    room = layout.head_bytes + ALIGNMENT
    padded = torch.full((4, 3, room), 0xA5, dtype=torch.uint8)
    heads_first = torch.full((3, 4, room), 0xA5, dtype=torch.uint8)
    flat = torch.full((ALIGNMENT + 9 * 3 * room,), 0xA5, dtype=torch.uint8)
    every_second = flat[ALIGNMENT:].view(9, 3, room)[1::2]
    for storage, pages in (
        (padded, padded[..., : layout.head_bytes]),
        (padded, padded),
        (heads_first, heads_first.transpose(0, 1)),
        (flat, every_second),
    ):
        storage.fill_(0xA5)
        content = filled(layout, pages)
        for block in range(4):
            for head in range(3):
                assert_holds(layout, pages[block, head], content, (block, head))
        assert int((storage != 0xA5).sum()) <= 4 * 3 * layout.head_bytes
        for block in range(4):
            for head in range(3):
                pages[block, head, : layout.head_bytes] = 0xA5
        assert torch.all(storage == 0xA5)


def test_refuses_sizes_without_a_layout() -> None:
    with pytest.raises(ConfigError, match="head size 72"):
        PageLayout(72, 16)
    with pytest.raises(ConfigError, match="group_size 32 at head size 256"):
        PageLayout(256, 16, 32)
    with pytest.raises(ConfigError, match="group_size 40 at head size 80"):
        PageLayout(80, 16, 40)
    for bits in ((1, 2), (2, 3), (5, 2), (2, 8)):
        with pytest.raises(ConfigError, match=f"keys of {bits[0]} bits and values of {bits[1]}"):
            PageLayout(128, 16, 0, *bits)
    with pytest.raises(ConfigError, match="use --block-size 64 or larger"):
        PageLayout(80, 16, 0, 3, 2)
    with pytest.raises(ConfigError, match="use --block-size 32 or larger"):
        PageLayout(96, 16, 0, 3, 2)
    for block_size in (0, 8, 24, -16):
        with pytest.raises(ConfigError, match="block size"):
            PageLayout(64, block_size)


def test_refuses_tensors_that_are_no_pages() -> None:
    layout = PageLayout(64, 16)
    size = layout.head_bytes
    with pytest.raises(ConfigError, match="uint8"):
        layout.views(torch.zeros(2, 2, size, dtype=torch.int8))
    with pytest.raises(ConfigError, match=f">= {size}"):
        layout.views(torch.zeros(2, 2, size - 1, dtype=torch.uint8))
    with pytest.raises(ConfigError, match="uint8"):
        layout.views(torch.zeros(2, size, 2, dtype=torch.uint8).transpose(1, 2))
    with pytest.raises(ConfigError, match="multiples of 128"):
        layout.views(torch.zeros(2, 2, size + 2, dtype=torch.uint8))
    with pytest.raises(ConfigError, match="multiples of 128"):
        layout.views(torch.zeros(2 * 2 * size + 64, dtype=torch.uint8)[64:].view(2, 2, size))
