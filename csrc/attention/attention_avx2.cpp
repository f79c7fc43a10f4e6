// Attention kernels for AVX2.
#include "attention/attention_float.h"
#include "base/dispatch.h"

namespace engine {

void fill_attention_avx2(Kernels& table) {
    table.attend = attend_float;
    table.merge = merge;
}

}  // namespace engine
