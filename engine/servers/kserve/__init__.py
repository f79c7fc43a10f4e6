"""The Open Inference Protocol (v2) of KServe and Triton, by REST and gRPC."""
