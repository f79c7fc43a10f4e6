// Packs rows of each tensor type of a checkpoint into rows of a panel.
//
// Each type unpacks its blocks into groups of 32 values. The groups are then placed in the panel as
// its layout demands: a row owns one 4-byte word of every 64 bytes of values, and one half of every
// 32 bytes of scales.
#include <cmath>

#include "repack/repack.h"

namespace engine {

namespace {

struct Group {
    uint8_t values[32];  // as in the panel; in 4-bit layouts, byte i < 16 holds values i and 16 + i
    uint16_t scales[2];  // the second is used only in layouts with two scales per group
    uint16_t minima[2];
};

uint16_t half_at(const uint8_t* bytes) {
    uint16_t half;
    memcpy(&half, bytes, sizeof half);
    return half;
}

uint16_t times(uint16_t half, int factor) {
    return float_to_half(half_to_float(half) * float(factor));
}

bool is_finite(uint16_t half) {
    return (half & 0x7c00) != 0x7c00;
}

template <Layout layout>
bool store_group(const Group& group, uint8_t* panel, int groups, int index, int lane) {
    constexpr int words = is_4_bit(layout) ? 4 : 8;
    uint8_t* values = panel + size_t(index) * group_bytes(layout);
    for (int word = 0; word < words; word++)
        memcpy(values + 64 * word + 4 * lane, group.values + 4 * word, 4);
    uint8_t* scales = values + 64 * words;
    if (layout == Layout::Q8) scales = panel + size_t(groups) * group_bytes(layout) + size_t(index) * 32;
    bool finite = true;
    for (int i = 0; i < scales_per_group(layout); i++) {
        memcpy(scales + 32 * i + 2 * lane, &group.scales[i], 2);
        finite &= is_finite(group.scales[i]);
        if (!has_minima(layout)) continue;
        memcpy(scales + 32 * (scales_per_group(layout) + i) + 2 * lane, &group.minima[i], 2);
        finite &= is_finite(group.minima[i]);
    }
    return finite;
}

template <class Block>
bool pack_blocks(const RowPiece& piece, uint8_t* panel, int lane) {
    bool finite = true;
    const uint8_t* block = piece.data;
    int groups = piece.columns / kGroup;
    for (int first = piece.begin / kGroup; first < piece.end / kGroup; first += Block::kGroups) {
        Group unpacked[Block::kGroups];
        Block::unpack(block, unpacked);
        for (int i = 0; i < Block::kGroups; i++)
            finite &= store_group<Block::kLayout>(unpacked[i], panel, groups, first + i, lane);
        block += Block::kBytes;
    }
    return finite;
}

// In layout F32, a row owns one 4-byte word of every 64 bytes of the panel.
bool pack_f32(const RowPiece& piece, uint8_t* panel, int lane) {
    const uint8_t* value = piece.data;
    for (int k = piece.begin; k < piece.end; k++, value += piece.block_stride)
        memcpy(panel + size_t(k) * 64 + 4 * lane, value, 4);
    return true;
}

bool pack_16bit(const RowPiece& piece, uint8_t* panel, int lane) {
    const uint8_t* value = piece.data;
    uint8_t* out = panel + size_t(piece.begin / 2) * 64 + 4 * lane;
    for (int pair = 0; pair < (piece.end - piece.begin) / 2;
         pair++, value += 2 * piece.block_stride, out += 64) {
        uint32_t word = half_at(value) | uint32_t(half_at(value + piece.block_stride)) << 16;
        memcpy(out, &word, 4);
    }
    if (piece.end % 2) memcpy(out, value, 2);
    return true;
}

// Packs 32 values below 16 into 16 bytes. Byte i holds value i in its low nibble and value 16 + i
// in its high nibble.
void pair_up(const uint8_t* values, uint8_t* pairs) {
    for (int i = 0; i < 16; i++) pairs[i] = uint8_t(values[i] | values[16 + i] << 4);
}

// Unpacks 16 bytes to 32 values: first the low nibbles of all bytes, then the high nibbles.
void split_nibbles(const uint8_t* packed, uint8_t* values) {
    for (int i = 0; i < 16; i++) {
        values[i] = packed[i] & 15;
        values[16 + i] = packed[i] >> 4;
    }
}

struct Q4_0 {
    static constexpr Layout kLayout = Layout::Q4;
    static constexpr int kGroups = 1, kBytes = 18;
    static void unpack(const uint8_t* block, Group* out) {
        out->scales[0] = half_at(block);
        out->minima[0] = times(out->scales[0], -8);
        memcpy(out->values, block + 2, 16);
    }
};

struct Q4_1 {
    static constexpr Layout kLayout = Layout::Q4;
    static constexpr int kGroups = 1, kBytes = 20;
    static void unpack(const uint8_t* block, Group* out) {
        out->scales[0] = half_at(block);
        out->minima[0] = half_at(block + 2);
        memcpy(out->values, block + 4, 16);
    }
};

void add_fifth_bits(const uint8_t* packed, uint8_t* values) {
    for (int i = 0; i < 32; i++) values[i] |= uint8_t((packed[i / 8] >> i % 8 & 1) << 4);
}

struct Q5_0 {
    static constexpr Layout kLayout = Layout::Q8;
    static constexpr int kGroups = 1, kBytes = 22;
    static void unpack(const uint8_t* block, Group* out) {
        out->scales[0] = half_at(block);
        split_nibbles(block + 6, out->values);
        add_fifth_bits(block + 2, out->values);
        for (uint8_t& value : out->values) value = uint8_t(value + 128 - 16);
    }
};

struct Q5_1 {
    static constexpr Layout kLayout = Layout::Q8M;
    static constexpr int kGroups = 1, kBytes = 24;
    static void unpack(const uint8_t* block, Group* out) {
        out->scales[0] = half_at(block);
        out->minima[0] = half_at(block + 2);
        split_nibbles(block + 8, out->values);
        add_fifth_bits(block + 4, out->values);
    }
};

struct Q8_0 {
    static constexpr Layout kLayout = Layout::Q8;
    static constexpr int kGroups = 1, kBytes = 34;
    static void unpack(const uint8_t* block, Group* out) {
        out->scales[0] = half_at(block);
        for (int i = 0; i < 32; i++) out->values[i] = block[2 + i] ^ 128;
    }
};

// The 16 quantization levels of the IQ4 types. 128 is added to each level.
constexpr uint8_t kLevels[16] = {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241};

void look_up_levels(const uint8_t* packed, uint8_t* values) {
    split_nibbles(packed, values);
    for (int i = 0; i < 32; i++) values[i] = kLevels[values[i]];
}

struct IQ4_NL {
    static constexpr Layout kLayout = Layout::Q8;
    static constexpr int kGroups = 1, kBytes = 18;
    static void unpack(const uint8_t* block, Group* out) {
        out->scales[0] = half_at(block);
        look_up_levels(block + 2, out->values);
    }
};

// Bytes of a block: 0-1 scale factor, 2-3 high two bits of eight scales, 4-7 low four bits of these
// scales, 8-135 level indices.
struct IQ4_XS {
    static constexpr Layout kLayout = Layout::Q8;
    static constexpr int kGroups = 8, kBytes = 136;
    static void unpack(const uint8_t* block, Group* out) {
        int high = half_at(block + 2);
        for (int g = 0; g < 8; g++) {
            int low = block[4 + g / 2] >> g % 2 * 4 & 15;
            out[g].scales[0] = times(half_at(block), (low | (high >> 2 * g & 3) << 4) - 32);
            look_up_levels(block + 8 + 16 * g, out[g].values);
        }
    }
};

// Bytes of a block: 0-15 scale | minimum << 4 for every 16 values, 16-79 2-bit values, 80-81 scale
// factor, 82-83 minimum factor.
struct Q2_K {
    static constexpr Layout kLayout = Layout::Q4G16;
    static constexpr int kGroups = 8, kBytes = 84;
    static void unpack(const uint8_t* block, Group* out) {
        for (int g = 0; g < 8; g++) {
            uint8_t values[32];
            for (int i = 0; i < 32; i++) values[i] = block[16 + g / 4 * 32 + i] >> g % 4 * 2 & 3;
            pair_up(values, out[g].values);
            for (int half = 0; half < 2; half++) {
                int packed = block[2 * g + half];
                out[g].scales[half] = times(half_at(block + 80), packed & 15);
                out[g].minima[half] = times(half_at(block + 82), -(packed >> 4));
            }
        }
    }
};

// Bytes of a block: 0-31 third bits of the values, 32-95 low two bits of the values, 96-107 sixteen
// 6-bit scales, 108-109 scale factor. Values have an offset of 4.
struct Q3_K {
    static constexpr Layout kLayout = Layout::Q4G16;
    static constexpr int kGroups = 8, kBytes = 110;
    static int scale(const uint8_t* packed, int index) {
        int low = packed[index % 8] >> index / 8 * 4 & 15;
        int high = packed[8 + index % 4] >> index / 4 * 2 & 3;
        return (low | high << 4) - 32;
    }
    static void unpack(const uint8_t* block, Group* out) {
        for (int g = 0; g < 8; g++) {
            uint8_t values[32];
            for (int i = 0; i < 32; i++) {
                int low = block[32 + g / 4 * 32 + i] >> g % 4 * 2 & 3;
                values[i] = uint8_t(low | (block[i] >> g & 1) << 2);
            }
            pair_up(values, out[g].values);
            for (int half = 0; half < 2; half++) {
                out[g].scales[half] = times(half_at(block + 108), scale(block + 96, 2 * g + half));
                out[g].minima[half] = times(out[g].scales[half], -4);
            }
        }
    }
};

// Reads scale and minimum of group g. Eight 6-bit scales and eight 6-bit minima are packed in 12
// bytes. For the first four groups, the scales are the low 6 bits of bytes 0-3, and the minima are
// the low 6 bits of bytes 4-7. For the last four groups, byte 4 + g holds the low 4 bits of the
// scale and of the minimum. Their high 2 bits are the top bits of bytes 0-3 (scales) and 4-7
// (minima).
void scale_group(const uint8_t* block, int g, Group& out) {
    const uint8_t* packed = block + 4;
    int scale = packed[g % 4] & 63, minimum = packed[4 + g % 4] & 63;
    if (g >= 4) {
        scale = (packed[4 + g] & 15) | packed[g - 4] >> 6 << 4;
        minimum = packed[4 + g] >> 4 | packed[g] >> 6 << 4;
    }
    out.scales[0] = times(half_at(block), scale);
    out.minima[0] = times(half_at(block + 2), -minimum);
}

// Bytes of a block: 0-1 scale factor, 2-3 minimum factor, 4-15 scales and minima, 16-143 4-bit
// values.
struct Q4_K {
    static constexpr Layout kLayout = Layout::Q4;
    static constexpr int kGroups = 8, kBytes = 144;
    static void unpack(const uint8_t* block, Group* out) {
        for (int g = 0; g < 8; g++) {
            uint8_t values[32];
            for (int i = 0; i < 32; i++) values[i] = block[16 + g / 2 * 32 + i] >> g % 2 * 4 & 15;
            pair_up(values, out[g].values);
            scale_group(block, g, out[g]);
        }
    }
};

// Bytes of a block: 0-15 as in Q4_K, 16-47 fifth bits of the values, 48-175 low four bits of the
// values.
struct Q5_K {
    static constexpr Layout kLayout = Layout::Q8M;
    static constexpr int kGroups = 8, kBytes = 176;
    static void unpack(const uint8_t* block, Group* out) {
        for (int g = 0; g < 8; g++) {
            for (int i = 0; i < 32; i++) {
                int low = block[48 + g / 2 * 32 + i] >> g % 2 * 4 & 15;
                out[g].values[i] = uint8_t(low | (block[16 + i] >> g & 1) << 4);
            }
            scale_group(block, g, out[g]);
        }
    }
};

// Bytes of a block: 0-127 low four bits of the values, 128-191 high two bits of the values, 192-207
// a signed scale for every 16 values, 208-209 scale factor. Values have an offset of 32.
struct Q6_K {
    static constexpr Layout kLayout = Layout::Q8G16;
    static constexpr int kGroups = 8, kBytes = 210;
    static void unpack(const uint8_t* block, Group* out) {
        for (int g = 0; g < 8; g++) {
            const uint8_t* lows = block + g / 4 * 64 + g % 2 * 32;
            const uint8_t* highs = block + 128 + g / 4 * 32;
            for (int i = 0; i < 32; i++) {
                int low = lows[i] >> g % 4 / 2 * 4 & 15, high = highs[i] >> g % 4 * 2 & 3;
                out[g].values[i] = uint8_t((low | high << 4) + 128 - 32);
            }
            for (int half = 0; half < 2; half++)
                out[g].scales[half] = times(half_at(block + 208), int8_t(block[192 + 2 * g + half]));
        }
    }
};

// Byte 0: exponent of the scale, with an offset of 127; 1-16 4-bit floats, as indices of doubled levels.
struct MXFP4 {
    static constexpr Layout kLayout = Layout::Q8;
    static constexpr int kGroups = 1, kBytes = 17;
    static void unpack(const uint8_t* block, Group* out) {
        constexpr int8_t levels[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
        out->scales[0] = float_to_half(std::ldexp(1.0f, block[0] - 128));
        split_nibbles(block + 1, out->values);
        for (uint8_t& value : out->values) value = uint8_t(levels[value] + 128);
    }
};

// A type of our own. Bytes: 0-3 two scales, 4-7 two minima, 8-23 4-bit values.
struct Q4_G16 {
    static constexpr Layout kLayout = Layout::Q4G16;
    static constexpr int kGroups = 1, kBytes = 24;
    static void unpack(const uint8_t* block, Group* out) {
        memcpy(out->scales, block, 4);
        memcpy(out->minima, block + 4, 4);
        memcpy(out->values, block + 8, 16);
    }
};

// A type of our own. Bytes: 0-3 two scales, 4-35 signed values.
struct Q8_G16 {
    static constexpr Layout kLayout = Layout::Q8G16;
    static constexpr int kGroups = 1, kBytes = 36;
    static void unpack(const uint8_t* block, Group* out) {
        memcpy(out->scales, block, 4);
        for (int i = 0; i < 32; i++) out->values[i] = block[4 + i] ^ 128;
    }
};

template <class Block>
constexpr StoredType quantized(const char* name) {
    return {name, Block::kLayout, Block::kGroups * kGroup, Block::kBytes, pack_blocks<Block>};
}

const StoredType kTypes[] = {
    {"F32", Layout::F32, 1, 4, pack_f32},
    {"F16", Layout::F16, 1, 2, pack_16bit},
    {"BF16", Layout::BF16, 1, 2, pack_16bit},
    quantized<Q4_0>("Q4_0"),
    quantized<Q4_1>("Q4_1"),
    quantized<Q5_0>("Q5_0"),
    quantized<Q5_1>("Q5_1"),
    quantized<Q8_0>("Q8_0"),
    quantized<Q2_K>("Q2_K"),
    quantized<Q3_K>("Q3_K"),
    quantized<Q4_K>("Q4_K"),
    quantized<Q5_K>("Q5_K"),
    quantized<Q6_K>("Q6_K"),
    quantized<IQ4_NL>("IQ4_NL"),
    quantized<IQ4_XS>("IQ4_XS"),
    quantized<MXFP4>("MXFP4"),
    quantized<Q4_G16>("Q4_G16"),
    quantized<Q8_G16>("Q8_G16"),
};

}  // namespace

const StoredType* stored_type(const std::string& name) {
    for (const StoredType& type : kTypes)
        if (name == type.name) return &type;
    return nullptr;
}

}  // namespace engine
