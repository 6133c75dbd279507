"""How linears multiply: one GEMM object for each precision."""
