// Norms, RoPE and reductions over logits in AVX2.
#include "base/dispatch.h"
#include "vector/vector_kernels.h"

namespace engine {

void fill_vector_avx2(Kernels& table) {
    fill_vector(table);
}

}  // namespace engine
