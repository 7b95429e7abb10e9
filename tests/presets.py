"""The preset echo4 as tests of front ends take it: every message quantized, or none."""

from echo_megatron.config import EchoConfig

ECHO4 = EchoConfig.preset("echo4", min_bytes=0)
PASS_THROUGH = EchoConfig.preset("echo4", min_bytes=2**62)
