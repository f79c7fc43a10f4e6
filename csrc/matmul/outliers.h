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

// Size of the scratch memory that outliers need.
ENGINE_INLINE size_t outlier_scratch_bytes(int columns) {
    return 2 * size_t(div_up(columns, kGroup)) * (kGroup * kPanelRows * sizeof(float) + sizeof(uint32_t));
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

// Multiplies outliers by the panels of one unit. The columns of all rows' outliers are dequantized once for a unit.
// The scratch memory of the matmul keeps them.
template <Layout layout>
class OutlierUnit {
  public:
    OutlierUnit(const MatmulJob& job, int unit, uint8_t* scratch)
        : lists_(job.outliers), weights_(*job.weights), groups_(weights_.groups()) {
        panels_ = job.epilogue.gated ? 2 : 1;
        first_ = weights_.panel(unit * panels_);
        columns_ = reinterpret_cast<float*>(scratch);
        used_ = reinterpret_cast<uint32_t*>(columns_ + panels_ * panel_floats());
    }

    // Notes the columns that have outliers in any row. It must be called before the first unit of a matmul.
    static void collect(const MatmulJob& job, uint8_t* scratch) {
        if (!job.outliers) return;
        const OutlierUnit unit(job, 0, scratch);
        memset(unit.used_, 0, size_t(unit.groups_) * sizeof(uint32_t));
        for (int row = 0; row < job.rows; row++)
            for (const Outlier* at = unit.list(row); at->column >= 0; at++)
                unit.used_[uint32_t(at->column) / kGroup] |= 1u << uint32_t(at->column) % kGroup;
    }

    // Dequantizes these columns. It must be called before the first `add` of a unit.
    void prepare() {
        for (int i = 0; lists_ && i < panels_; i++)
            for (int g = 0; g < groups_; g++)
                for (uint32_t left = used_[g]; left != 0; left &= left - 1)
                    dequantize(i, g, __builtin_ctz(left));
    }

    // Adds the products of a row's outliers to the accumulators of the unit, in the order of the columns. The
    // accumulators of a second panel are `distance` floats after those of the first.
    ALWAYS void add(int row, float* sums, int distance = kPanelRows) {
        if (!lists_) return;
        for (int i = 0; i < panels_; i++, sums += distance) {
            const float* columns = columns_ + i * panel_floats();
            Floats totals[kVectors];
            for (int v = 0; v < kVectors; v++) totals[v] = load(sums + v * kLanes);
            for (const Outlier* at = list(row); at->column >= 0; at++) {
                const float* weights = columns + uint32_t(at->column) * size_t(kPanelRows);
                for (int v = 0; v < kVectors; v++) totals[v] += load(weights + v * kLanes) * at->value;
            }
            for (int v = 0; v < kVectors; v++) store(sums + v * kLanes, totals[v]);
        }
    }

  private:
    static constexpr int kVectors = kPanelRows / kLanes;

    int panel_floats() const { return groups_ * kGroup * kPanelRows; }
    const Outlier* list(int row) const { return lists_ + outliers_begin(row, groups_); }

    void dequantize(int i, int g, int k) const {
        constexpr int kScales = scales_per_group(layout), kPerScale = kGroup / kScales;
        const uint8_t* panel = first_ + size_t(i) * weights_.stride();
        const uint8_t* group = panel + size_t(g) * group_bytes(layout);
        const uint16_t* scales = scales_of<layout>(panel, groups_, g) + k / kPerScale * kPanelRows;
        float* out = columns_ + i * panel_floats() + (g * kGroup + k) * kPanelRows;
        for (int n = 0; n < kPanelRows; n += kLanes) {
            Floats value = stored_values<layout>(group, k, n), scale = load_halves(scales + n);
            store(out + n, has_minima(layout) ? value * scale + load_halves(scales + kScales * kPanelRows + n)
                                              : (value - 128.0f) * scale);
        }
    }

    const Outlier* lists_;  // null: there are no outliers
    const Matrix& weights_;
    int groups_, panels_;
    const uint8_t* first_;  // the first panel of the unit
    float* columns_;        // [panel][group][column][16 channels]
    uint32_t* used_;        // [group]: bit k says whether column k has outliers
};

// The job with the outliers of its input. `bytes` is the size of the packed groups.
ENGINE_INLINE MatmulJob with_outliers(MatmulJob job, size_t bytes) {
    job.outliers = outliers_after(const_cast<uint8_t*>(job.input), bytes);
    return job;
}

}  // namespace
}  // namespace engine
