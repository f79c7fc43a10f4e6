// The kernels of layers that keep a state, for any CPU.
#include "base/dispatch.h"
#include "recurrent/recurrent_kernels.h"

namespace engine {

void fill_recurrent_generic(Kernels& table) {
    fill_recurrent(table);
}

}  // namespace engine
