"""The products of integers, rendered alone: right for every layout, and the same to the last bit on every processor."""

import shutil
import subprocess
from pathlib import Path

import jinja2
import numpy as np
import pytest
import torch

import foredraft.model.compiled
from foredraft.model.compiled.blocks import DEPTH, FORMATS, STRIP, BlockMatrix, packed_blocks
from foredraft.model.machine import processor_lines

pytestmark = pytest.mark.slow

LAYOUTS = sorted({each.layout for each in FORMATS.values()})
DEEP = 35 * DEPTH  # more blocks than are multiplied together
COLUMNS = 3 * STRIP
COUNTS = (1, 2, 3, 4, 5, 7, 8, 9, 17, 33)

PROGRAM = """
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <iostream>
#include <vector>
{{ headers }}
{%- for layout in layouts %}
namespace case_{{ loop.index0 }} {
{% with bits = layout.bits, numbers = layout.numbers, minima = layout.minima %}{% include "integers.cpp.jinja" %}
{% endwith %}
void run(int64_t count, int64_t columns) {
    std::vector<uint16_t> given(count * DEPTH);
    std::vector<uint8_t> weights(columns / STRIP * STRIP_BYTES);
    std::cin.read((char*)given.data(), 2 * given.size()).read((char*)weights.data(), weights.size());
    std::vector<int8_t> numbers(2 * count * DEPTH);
    std::vector<Block> blocks(count * ROW_BLOCKS);
    std::vector<int64_t> coarse(ROW_BLOCKS);
    std::vector<float> limits, sums(count * STRIP);
    const Rows rows{count, numbers.data(), blocks.data(), coarse.data()};
    for (int64_t row = 0; row < count; row++) {
        limits.push_back(limit_of(&given[row * DEPTH]));
    }
    for (int64_t block = 0; block < ROW_BLOCKS; block++) {
        quantise(rows, block, given.data(), limits.data());
    }
    for (int64_t strip = 0; strip < columns / STRIP; strip++) {
        multiply_strip(rows, &weights[strip * STRIP_BYTES], sums.data());
        std::cout.write((char*)sums.data(), sums.size() * sizeof(float));
    }
}
}
{%- endfor %}
int main() {
    int64_t number, count, columns;
    while (std::cin.read((char*)&number, 8).read((char*)&count, 8).read((char*)&columns, 8)) {
        switch (number) {
{%- for _ in layouts %}
        case {{ loop.index0 }}: case_{{ loop.index0 }}::run(count, columns); break;
{%- endfor %}
        }
    }
}
"""

# instructions that this machine lacks, by what they are defined to do
STAND_INS = """
#include <immintrin.h>
template <class Vector>
Vector stand_in_dots(Vector sum, Vector weights, Vector row) {
    for (size_t lane = 0; lane < sizeof(Vector) / 4; lane++) {
        int32_t total;
        std::memcpy(&total, (char*)&sum + 4 * lane, 4);
        for (size_t byte = 4 * lane; byte < 4 * lane + 4; byte++) {
            total += ((uint8_t*)&weights)[byte] * ((int8_t*)&row)[byte];
        }
        std::memcpy((char*)&sum + 4 * lane, &total, 4);
    }
    return sum;
}
template <class Vector>
Vector stand_in_fused(Vector a, Vector b, Vector c) {
    for (size_t lane = 0; lane < sizeof(Vector) / 4; lane++) {
        c[lane] = __builtin_fmaf(a[lane], b[lane], c[lane]);
    }
    return c;
}
inline __m512 stand_in_widened(__m256i halves) {
    __m512 values;
    const __m256 parts[2] = {
        _mm256_cvtph_ps(_mm256_castsi256_si128(halves)), _mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1))};
    std::memcpy(&values, parts, sizeof(values));
    return values;
}
#define _mm256_dpbusd_avx_epi32 stand_in_dots<__m256i>
#define _mm512_dpbusd_epi32 stand_in_dots<__m512i>
#define _mm512_fmadd_ps stand_in_fused<__m512>
#define _mm512_cvtph_ps stand_in_widened
"""

X86 = {  # by a processor's flag for the instructions: lanes, the compiler's options, and the macro that they define
    "avx2": (8, "-mavx2 -mfma -mf16c", None),
    "avx_vnni": (8, "-mavx2 -mfma -mf16c -mavxvnni", "__AVXVNNI__"),
    "avx512bw": (16, "-mavx2 -mfma -mf16c -mavx512f -mavx512bw", None),
    "avx512_vnni": (16, "-mavx2 -mfma -mf16c -mavx512f -mavx512bw -mavx512vnni", "__AVX512VNNI__"),
}
ARM = ("aarch64-linux-gnu-g++", "qemu-aarch64-static")


def program(folder, compiler, lanes, options, headers):
    """Return the path of a program that multiplies as `PROGRAM` says."""
    sources = jinja2.FileSystemLoader(Path(foredraft.model.compiled.__file__).parent)
    environment = jinja2.Environment(loader=sources, undefined=jinja2.StrictUndefined)  # noqa: S701  # C++ takes no escapes
    text = environment.from_string(PROGRAM).render(
        headers=headers, layouts=LAYOUTS, lanes=lanes, depth=DEEP, locality=0, stands_out=4.0
    )
    (folder / "products.cpp").write_text(text)
    command = [compiler, "-std=c++17", "-O0", "-ffp-contract=off", *options.split(), "products.cpp", "-o", "products"]
    subprocess.run(command, cwd=folder, check=True)
    return folder / "products"


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    """The command of each variant that can be run here, by name."""
    found, has = {}, " ".join(processor_lines("flags")).split()
    if "avx2" in has:
        for flag, (lanes, options, macro) in X86.items():
            if not (macro or flag in has):
                continue  # what it would be replaced by is not written
            native = (lanes, options, "#include <immintrin.h>")
            stood_in = (lanes, f"{X86['avx2'][1]} -Wno-psabi", f"{STAND_INS}#define {macro}\n")
            found[flag] = [program(tmp_path_factory.mktemp(flag), "g++", *(native if flag in has else stood_in))]
    if all(map(shutil.which, ARM)):
        neon = program(
            tmp_path_factory.mktemp("neon"), ARM[0], 4, "-march=armv8.2-a+dotprod -static", "#include <arm_neon.h>"
        )
        found["neon"] = [ARM[1], neon]
    return found


def products(command, number, count, rows, blocks):
    """Return float32[count, columns] of the first rows."""
    strips = len(blocks)
    given = np.array([number, count, strips * STRIP]).tobytes() + rows[:count].view(torch.int16).numpy().tobytes()
    done = subprocess.run(command, input=given + blocks.numpy().tobytes(), stdout=subprocess.PIPE, check=True)
    return np.frombuffer(done.stdout, np.float32).reshape(strips, count, STRIP).swapaxes(0, 1).reshape(count, -1)


@pytest.mark.parametrize("number", range(len(LAYOUTS)))
def test_products_are_right_and_have_the_same_bits_in_every_variant_and_among_any_rows(number, programs):
    if not programs:
        pytest.skip("neither AVX2 nor a compiler and an emulator for ARM")
    layout, rng = LAYOUTS[number], np.random.default_rng(number)
    low, high = (0, 2**layout.bits) if layout.minima else (layout.least, -layout.least)
    integers = rng.integers(low, min(high, 128), (COLUMNS, DEEP))
    integers[:, :DEPTH] = min(high, 128) - 1  # sums as large as can be
    shape = (COLUMNS, DEEP // layout.numbers)
    scales, minima = rng.normal(size=(2, *shape)).astype(np.float16).astype(np.float32) / 16
    matrix = BlockMatrix(layout, integers.astype(np.int8), scales, minima * layout.minima)
    rows = torch.from_numpy(rng.normal(size=(max(COUNTS), DEEP))).bfloat16()
    rows[:, :DEPTH] = 1.0
    rows[3, DEPTH : 2 * DEPTH] = 0
    rows[7:, 5 * DEPTH : 6 * DEPTH] *= 1000  # what else there is hardly counts
    rows[4, 5], rows[5, 6] = torch.inf, torch.nan
    expected = rows.double().numpy() @ matrix.dequantised().double().numpy().T
    blocks, finite = packed_blocks(matrix), np.delete(np.arange(max(COUNTS)), [4, 5])
    whole = {name: products(command, number, max(COUNTS), rows, blocks) for name, command in programs.items()}
    first = next(iter(whole.values()))
    error = np.linalg.norm(first - expected, axis=1) / np.linalg.norm(expected, axis=1)
    assert error[finite].max() < 1.2e-2  # half a step is 1 / 254 of a block's largest number
    assert error[7:].max() < 5e-4  # here it is 1 / 32,512
    assert not np.isfinite(first[4:6]).any()
    for name, command in programs.items():
        assert np.array_equal(whole[name], first, equal_nan=True), name
        for count in COUNTS:
            assert np.array_equal(products(command, number, count, rows, blocks), first[:count], equal_nan=True)
