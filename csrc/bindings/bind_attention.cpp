// Binds attention over a KV cache that Python owns, for tests and micro-benchmarks.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <atomic>
#include <chrono>

#include "attention/attention.h"
#include "attention/attention_cache.h"
#include "base/threads.h"
#include "bindings/bindings.h"

namespace engine {
namespace {

using Floats2 = Array<float, 2>;

// Aligned memory for the cache and for scratch. It is on the heap, so that AddressSanitizer detects accesses
// past the end.
struct alignas(64) Line {
    uint8_t bytes[64];
};
using Lines = std::vector<Line>;

Lines lines_for(size_t bytes) {
    return Lines(round_up_size(bytes, 64) / 64);
}

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
    return std::chrono::duration<double>(Clock::now() - start).count();
}

KvType type_named(const std::string& name) {
    if (name == "f32") return KvType::F32;
    if (name == "bf16") return KvType::BF16;
    if (name == "int8") return KvType::INT8;
    throw nb::value_error("the cache's type is f32, bf16 or int8");
}

class Cache {
  public:
    Cache(const std::string& type, int layers, int kv_heads, int head_dim, int block_size, int64_t blocks,
          int latent)
        : cache_{type_named(type), layers, kv_heads, head_dim, block_size, blocks, nullptr, latent} {
        memory_ = lines_for(cache_.bytes());
        cache_.data = memory_.data()->bytes;
    }
    const KvCache& get() const { return cache_; }

    void fill(int byte) { memset(cache_.data, byte, cache_.bytes()); }
    void erase(int64_t slot) { erase_kv(cache_, slot); }
    void write(const std::string& isa, int layer, Array<const int64_t, 1> slots, Array<const float, 2> keys,
               Array<const float, 2> values) {
        size_t width = size_t(cache_.kv_heads) * size_t(cache_.head_dim);
        for (size_t i = 0; i < slots.shape(0); i++)
            kernels_named(isa).write_kv(cache_, layer, slots.data()[i], keys.data() + i * width,
                                        values.data() + i * width);
    }
    void read(int layer, Array<const int64_t, 1> slots, Floats2 keys, Floats2 values) const {
        float *to_keys = keys.data(), *to_values = values.data();
        for (size_t i = 0; i < slots.shape(0); i++) {
            TokenPlace place = place_of(cache_, slots.data()[i]);
            for (int head = 0; head < cache_.kv_heads; head++) {
                uint8_t* key_tile = cache_.key_tile(layer, place.block, head, place.tile);
                uint8_t* value_tile = cache_.value_tile(layer, place.block, head, place.tile);
                for (int d = 0; d < cache_.head_dim; d++)
                    *to_keys++ = value_at(key_tile, key_offset(cache_.type, place.lane, d), place.lane);
                for (int d = 0; d < cache_.head_dim && cache_.latent == 0; d++)
                    *to_values++ = value_at(
                        value_tile, value_offset(cache_.type, cache_.dim(), place.lane, d), place.lane);
            }
        }
    }

  private:
    float value_at(uint8_t* tile, size_t offset, int lane) const {
        if (cache_.type == KvType::INT8)
            return float(int8_t(tile[offset])) * *scale_at(tile, cache_.dim(), lane);
        uint16_t half;
        float single;
        memcpy(&half, tile + offset, sizeof half);
        if (cache_.type == KvType::BF16) return bf16_to_float(half);
        memcpy(&single, tile + offset, sizeof single);
        return single;
    }

    KvCache cache_;
    Lines memory_;
};

// The tokens of one attention call, with their attention schedule.
class BoundBatch {
  public:
    BoundBatch(int heads, double scale, int window, int decode_tokens, Array<const int32_t, 1> positions,
               Array<const int32_t, 1> row_of, Array<const int32_t, 2> tables,
               Array<const int32_t, 1> prefix_groups, Array<const int32_t, 1> prefix_blocks,
               std::optional<Array<const int32_t, 1>> visible_end, bool centered)
        : positions_(positions),
          row_of_(row_of),
          tables_(tables),
          groups_(prefix_groups),
          shared_(prefix_blocks),
          visible_end_(visible_end),
          heads_(heads),
          scale_(float(scale)),
          window_(window),
          centered_(centered) {
        batch_.tokens = int(positions.shape(0));
        batch_.decode_tokens = decode_tokens;
        batch_.rows = int(tables.shape(0));
        batch_.positions = positions.data();
        batch_.row_of = row_of.data();
        batch_.tables = tables.data();
        batch_.table_width = int(tables.shape(1));
        batch_.prefix_groups = prefix_groups.data();
        batch_.prefix_blocks = prefix_blocks.data();
        if (visible_end) batch_.visible_end = visible_end->data();
    }

    void schedule(int block_size) { schedule_.build(batch_, block_size, window_, centered_); }

    // Returns (tokens, first chunk, number of chunks, first part) for each item of the schedule.
    std::vector<std::tuple<std::vector<int>, int, int, int>> items() const {
        std::vector<std::tuple<std::vector<int>, int, int, int>> result;
        for (int i = 0; i < batch_.num_items; i++) {
            const AttentionItem& item = batch_.items[i];
            const int32_t* tokens = batch_.item_tokens + item.first;
            std::vector<int> of_item(tokens, tokens + item.count);
            result.emplace_back(of_item, item.chunk, item.chunks, item.part);
        }
        return result;
    }

    // Computes attention `repeats` times. The first run uses layer `layer` of the cache, and each
    // further run the next layer, starting again after the last one. Returns the seconds of each
    // run.
    std::vector<double> run(const std::string& isa, const Cache& holder, int layer,
                            Array<const float, 2> queries, Floats2 out, int threads, int repeats,
                            float softcap, std::optional<Array<const float, 1>> slopes,
                            std::optional<Array<const float, 1>> sinks) {
        const KvCache& cache = holder.get();
        const Kernels& kernels = kernels_named(isa);
        schedule(cache.block_size);
        AttentionShape shape{heads_, cache.kv_heads, cache.head_dim, scale_, window_, softcap};
        shape.latent = cache.latent;
        if (slopes) shape.slopes = slopes->data();
        if (sinks) shape.sinks = sinks->data();
        shape.centered = centered_;
        Lines parts = lines_for(size_t(schedule_.num_parts()) * part_floats(shape) * sizeof(float));
        std::vector<Lines> scratch(size_t(threads), lines_for(kernels.attend_scratch_bytes(shape)));
        AttentionJob job{&shape,
                         &cache,
                         &batch_,
                         layer,
                         queries.data(),
                         int(queries.shape(1)),
                         out.data(),
                         int(out.shape(1)),
                         reinterpret_cast<float*>(parts.data())};
        ThreadPool pool(threads, {});
        std::vector<double> seconds;
        for (int i = 0; i < repeats; i++) {
            job.layer = (layer + i) % cache.layers;
            std::atomic<int> unit{0}, merged{0};
            auto work = [&](int thread) {
                uint8_t* own = scratch[size_t(thread)].data()->bytes;
                for (int u; (u = unit++) < batch_.num_items * cache.kv_heads;)
                    kernels.attend(job, u / cache.kv_heads, u % cache.kv_heads, own);
                pool.barrier(thread);
                for (int m; (m = merged++) < batch_.num_merges;) kernels.merge(job, m);
            };
            auto start = Clock::now();
            pool.run(work);
            seconds.push_back(seconds_since(start));
        }
        return seconds;
    }

    double schedule_seconds(int block_size, int repeats) {
        auto start = Clock::now();
        for (int i = 0; i < repeats; i++) schedule(block_size);
        return seconds_since(start) / repeats;
    }

  private:
    Array<const int32_t, 1> positions_, row_of_;
    Array<const int32_t, 2> tables_;
    Array<const int32_t, 1> groups_, shared_;
    std::optional<Array<const int32_t, 1>> visible_end_;
    int heads_;
    float scale_;
    int window_;
    bool centered_;
    Batch batch_;
    AttentionSchedule schedule_;
};

}  // namespace

void bind_attention(nb::module_& module) {
    using namespace nb::literals;
    nb::class_<Cache>(module, "AttentionCache")
        .def(nb::init<const std::string&, int, int, int, int, int64_t, int>(), "type"_a, "layers"_a,
             "kv_heads"_a, "head_dim"_a, "block_size"_a, "blocks"_a, "latent"_a = 0)
        .def("fill", &Cache::fill)
        .def("erase", &Cache::erase)
        .def("write", &Cache::write, "isa"_a, "layer"_a, "slots"_a, "keys"_a, "values"_a)
        .def("read", &Cache::read, "layer"_a, "slots"_a, "keys"_a, "values"_a);
    nb::class_<BoundBatch>(module, "AttentionBatch")
        .def(nb::init<int, double, int, int, Array<const int32_t, 1>, Array<const int32_t, 1>,
                      Array<const int32_t, 2>, Array<const int32_t, 1>, Array<const int32_t, 1>,
                      std::optional<Array<const int32_t, 1>>, bool>(),
             "heads"_a, "scale"_a, "window"_a, "decode_tokens"_a, "positions"_a, "row_of"_a, "tables"_a,
             "prefix_groups"_a, "prefix_blocks"_a, "visible_end"_a = nb::none(), "centered"_a = false)
        .def("schedule", &BoundBatch::schedule, "block_size"_a)
        .def("items", &BoundBatch::items)
        .def("run", &BoundBatch::run, "isa"_a, "cache"_a, "layer"_a, "queries"_a, "out"_a, "threads"_a = 1,
             "repeats"_a = 1, "softcap"_a = 0.0f, "slopes"_a = nb::none(), "sinks"_a = nb::none())
        .def("schedule_seconds", &BoundBatch::schedule_seconds, "block_size"_a, "repeats"_a);
}

}  // namespace engine
