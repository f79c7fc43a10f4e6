// Attention kernels for AVX-512.
#include "attention/attention_float.h"
#include "base/dispatch.h"

namespace engine {

void fill_attention_avx512(Kernels& table) {
    table.attend = attend_float;
    table.merge = merge;
    table.prefers_int8_cache = true;  // half of the bytes outweighs the conversion to float
}

}  // namespace engine
