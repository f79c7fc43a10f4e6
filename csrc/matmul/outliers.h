// Outliers of activations. If one value of a group of 32 has more than half of the group's sum of squares, it
// is an outlier. Its column is multiplied in float, and the group is quantized without it. The scale of the
// group then fits the other 31 values, which an outlier would round away.
#pragma once
#include "base/kernels.h"
#include "base/unroll.h"
#include "base/with_layout.h"
#include "matmul/dequantize.h"

namespace engine {
namespace {

constexpr float kOutlierShare = 0.5f;  // of a group's sum of squares

// If a group has an outlier, appends it to the list that ends at `end`, and returns a copy of the group in
// `rest` that has zero in its place. Otherwise returns the group. A group with NaN or infinity has none,
// because the comparison is false.
ENGINE_INLINE const float* take_outlier(const float* group, int column, float* rest, Outlier*& end) {
    Floats squares{}, largest{};
    for (int i = 0; i < kGroup; i += kLanes) {
        Floats x = load(group + i), square = x * x;
        squares += square;
        largest = square > largest ? square : largest;
    }
    float sum = 0, max = 0;
    for (int i = 0; i < kLanes; i++) {
        sum += squares[i];
        max = largest[i] > max ? largest[i] : max;
    }
    if (!(max > kOutlierShare * sum)) return group;
    int at = 0;
    while (group[at] * group[at] != max) at++;
    memcpy(rest, group, kGroup * sizeof(float));
    rest[at] = 0;
    *end++ = {column + at, group[at]};
    return rest;
}

// Index of the first outlier of a row. A list has at most one outlier per group and ends with a column of -1.
ENGINE_INLINE size_t outliers_begin(int row, int groups) {
    return size_t(row) * size_t(groups + 1);
}

// The lists follow the packed groups of all rows, which take `bytes`.
ENGINE_INLINE Outlier* outliers_after(uint8_t* input, size_t bytes) {
    return reinterpret_cast<Outlier*>(input + round_up_size(bytes, 64));
}

ENGINE_INLINE size_t bytes_with_outliers(size_t bytes, int rows, int columns) {
    return round_up_size(bytes, 64) + outliers_begin(rows, div_up(columns, kGroup)) * sizeof(Outlier);
}

// Calls pack(group, index) for each group of a row. The last group is padded with zeros.
template <class Pack>
ENGINE_INLINE void for_groups(const float* x, int columns, Pack pack) {
    const int full = columns / kGroup, left = columns - full * kGroup;
    for (int g = 0; g < full; g++) pack(x + g * kGroup, g);
    if (left == 0) return;
    float last[kGroup] = {};
    for (int i = 0; i < left; i++) last[i] = x[full * kGroup + i];
    pack(last, full);
}

// Does the same without the outliers of the row, which go to `list`.
template <class Pack>
ENGINE_INLINE void without_outliers(const float* x, int columns, Outlier* list, Pack pack) {
    for_groups(x, columns, [&](const float* group, int g) ALWAYS {
        float rest[kGroup];
        pack(take_outlier(group, g * kGroup, rest, list), g);
    });
    *list = {-1, 0};
}

// Multiplies outliers by the panels of one unit. A column is dequantized when a row has an outlier in it for
// the first time. The scratch memory of the matmul keeps it for the other rows.
template <Layout layout>
class OutlierUnit {
  public:
    OutlierUnit(const MatmulJob& job, uint8_t* scratch)
        : lists_(job.outliers), weights_(*job.weights), groups_(weights_.groups()) {
        panels_ = job.epilogue.gated ? 2 : 1;
        columns_ = reinterpret_cast<float*>(scratch);
        kept_ = reinterpret_cast<uint32_t*>(columns_ + panels_ * groups_ * kGroup * kPanelRows);
    }

    void start(int unit) {
        if (!lists_) return;
        first_ = weights_.panel(unit * panels_);
        memset(kept_, 0, size_t(panels_ * groups_) * sizeof(uint32_t));
    }

    // Adds the products of a row's outliers to the accumulators of the unit, in the order of the columns.
    ALWAYS void add(int row, float* sums) {
        if (!lists_) return;
        for (int i = 0; i < panels_; i++) {
            Floats totals[kVectors];
            for (int v = 0; v < kVectors; v++) totals[v] = load(sums + i * kPanelRows + v * kLanes);
            for (const Outlier* at = lists_ + outliers_begin(row, groups_); at->column >= 0; at++) {
                const float* weights = column(i, at->column / kGroup, at->column % kGroup);
                for (int v = 0; v < kVectors; v++) totals[v] += load(weights + v * kLanes) * at->value;
            }
            for (int v = 0; v < kVectors; v++) store(sums + i * kPanelRows + v * kLanes, totals[v]);
        }
    }

  private:
    static constexpr int kVectors = kPanelRows / kLanes;

    ALWAYS const float* column(int i, int g, int k) {
        const int index = i * groups_ + g;
        float* out = columns_ + (index * kGroup + k) * kPanelRows;
        if (!(kept_[index] >> k & 1)) dequantize(first_ + size_t(i) * weights_.stride(), g, k, out);
        kept_[index] |= 1u << k;
        return out;
    }

    __attribute__((noinline)) void dequantize(const uint8_t* panel, int g, int k, float* out) const {
        constexpr int kScales = scales_per_group(layout), kPerScale = kGroup / kScales;
        const uint8_t* group = panel + size_t(g) * group_bytes(layout);
        const uint16_t* scales = scales_of<layout>(panel, groups_, g) + k / kPerScale * kPanelRows;
        for (int n = 0; n < kPanelRows; n += kLanes) {
            Floats value = stored_values<layout>(group, k, n), scale = load_halves(scales + n);
            store(out + n, has_minima(layout) ? value * scale + load_halves(scales + kScales * kPanelRows + n)
                                              : (value - 128.0f) * scale);
        }
    }

    const Outlier* lists_;  // null: there are no outliers
    const Matrix& weights_;
    int groups_, panels_;
    const uint8_t* first_ = nullptr;  // the first panel of the unit
    float* columns_;                  // [panel][group][column][16 channels]
    uint32_t* kept_;                  // [panel][group]: bit k says whether column k is kept
};

// The job with the outliers of its input. `bytes` is the size of the packed groups.
ENGINE_INLINE MatmulJob with_outliers(MatmulJob job, size_t bytes) {
    job.outliers = outliers_after(const_cast<uint8_t*>(job.input), bytes);
    return job;
}

}  // namespace
}  // namespace engine
