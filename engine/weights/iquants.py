"""Unpacks the IQ1, IQ2 and IQ3 types, which store vectors of 4 or 8 values as indices into a grid.

A grid lists the vectors that a type can store. Its rows are in ascending order, if the first
component is the least significant digit. So a grid is stored as a bit map over all vectors. The
sign of a value is stored apart, except in the IQ1 types.
"""

from base64 import b85decode
from functools import cache
from typing import Any
from zlib import decompress

import numpy as np
from numpy.typing import NDArray

from engine.weights.grouped import Bytes, Floats, QuantizedGroups, half, plane

Indices = NDArray[np.integer[Any]]

_BIT_MAPS = {
    "IQ2_XXS": (
        b"by7>NgfI-Vva))Lh*ggnb;U7QKFuj#lKx=CSX3&Fo!WuVU;XfC4O$NnfC?%Eu>%UFov^A>{M^fzuL2l?()_&EB=#"
        b"p&#6VTjX?jA<Hxep`bs|-~Wmj>myrSc>D20!69;IAH>v*-Rcj}@td64E+nQR@JQH!TLP(0D?6`uy_k-"
        b";uM5Z;G>VbT~zS5m`{4BBo^n?uRPBR#66L?7DiQS8=H7e}evv)s#xmNXkB*|aoy?v(X4`z^yaVw&Sqs4U@XkiU)W"
        b"ka=Uy+#a#+H|%)EIflD$%o)n7>H+?!Ehpd8eA&N3f7AW}"
    ),
    "IQ2_XS": (
        b"T~SM}gfI-"
        b"VvWj|&h!x_LQCEmlRIE@>Ir+5E_o^8PP2$*2@BQj`eQrH^FL&jpI4-6tP(|_7qr1RTXet6w1vh)yueWm-We{1Hrx"
        b">t6VTTRyvM!o{mMSQxH+q2s-"
        b"pUCWH;ySYYz<<S_I<{;0HefD?+FMg>{HnXW~&u$6{K&qWKst(xN1z{iRn40S7A%Zp=(ISX7Z{|Kr_lx-qM1+&oHA"
        b"X+Tkfx9aC$}C(JYK4atJ`GR$5Id)e)&dBGS-`-"
        b"{0j0cGes*nFOZ8|<{onn{f&{UhNF@eaij>K~*1%^Z@OKH|9LG4d%oRJhA^KdhgSyGo1^2UCfa?k-"
        b"^A72qQ2Mr=ldg?<GFvRP1hCAlv|Ken=5@+`e|Ow`v)+UFFRdm;Qkl*8|_g2B3dPow(-"
    ),
    "IQ2_S": (
        b"ZBk2a1tAQJvWhqbnib-"
        b"d5i7(g5G#~Z)(K4esuqprXKZYPnGIXEXU9ugR^~2sNU}`5<FU+a*ENz^!3Br`jgpfPZ*!KY^0fQ_Vj?Xvg@~A{jR"
        b"EC7O0`(R3Z>Foo>VgVTCbo(Ay}pY0-"
        b"bGShm`0*_?N|@3~j1ok2bS*s;TijETNGxf6{{#zXUrdQ$Y=KhYeqXXva5&I6iSxO77KmdAyBz9k!i4vimZtUR0w4"
        b"rS>|6fRqElMzGKZ(}8?Ia0iS2L@t2ewLS#tnvckUm=N$sFlvb;&)O3X**E2OC~hM=fpmNdN?>%e<2}hOK~F93h#A"
        b"a#^-{YurFG0V;=V5nyWBnU{E4g%r7I5B)R4hlUv(%?KP$`RvSL$0@f-lB{L^8V@7RDuPp^T{$G~Kq-"
        b"Woc7Cgg;X%wF`PG_IiX?eJG-VArT#HT-5RdTaUu"
    ),
    "IQ3_XXS": (
        b"O;JG#!!Qg}LI+`|4z_!q;=&$~!5(CK8heG=sn49{G~HB6n^>0QWP6xY;M(kNQlOjI0}H0bCO8x`Qc1WjK=p_4LIK"
        b"|JlAu}Jk^&|c#b)9wRD()J#=WaJUcQ2aYM{opwGaLAjJ}K7Vo9AOFZ3q*&Gbs{M&pi_BM8Kr>rdf#=02O5RM-"
        b"{J<U1?Fv!O6Xlx7C=*-"
        b"p3|p$h4W)!hc2CS}CXL7Z&=cUjM+EAnXIIJNE$&=9YkHWJ|=@_P;!>2JbtUH?Lb^xm+C?{YUC_maCT$E-"
        b"Y(5m$m~zoR>5Aie"
    ),
    "IQ3_S": (
        b"Em1*A13?h19ab1TO&|~Ggbl2}=*S2gPZL@H(+N4u-ZtU`Mo|#o5kDa02}1A{_RQLchOX+as@eVdJ-PRgHkZ@UTX_"
        b"0<@^KX~I-"
        b"eeFs=UlP8X3~!)!o536Tl$wht7z=<(%$u&Ga34<b=JfB8|1sW?V;IlzEG=)V;zov<6&j4~gr{pFg*$Pt|ieHXSLy"
        b"LD=yO-5a-"
        b"o#9)oFQMj>8l{m;t7SYR^jW_}5k@_2U+}i+wEQK_x;vBcKt>N6Qs!{}}nyi6?L5UHN>YOIhK&*$0KnLd)Kd_UE#D"
        b"?TEpJ1yjcU7(ks$h`~4iKjhMZ!SF_QaGIgxy|uu#gItYu7=@WTD&xO6A42bge$48UQ;TY$h$$Bw{(cXz3#q95MOk"
        b"&;|e38jy@w0<pzh=WegB;o{Nc96o;}nOte|E`MRt2L1p"
    ),
    "IQ1": (
        b"EmBQuR7n)QuersvnJD+QRWU9a?IwXoR*{Lbl&a)a5+%_pQ)Mgqh=P*UKo)5?p|t}Y6la8p#%vVQjY4##e_)sa7s7"
        b"1P(lcSeAOpH^<w{)nQQgk2>cY9_oO{mGM@f^(@mtjTO<Y2&&yvHW*_S9Rw;pY6GN~{g1XAn|$KqXY_V{f`!T2MJQ"
        b"7)hwanzRtxb3Hdj3O5%NfQg>PpMTOn_y@!gBucF)6_>I&LMDd&rw8Z{-uYRz`5!jUG*1^?NqW|wOCBExxW^V%M?-"
        b"+HZw{RxYIxA*C}>1tmIa_<&@Tg!Yzest;R@`k$fR8U`gRfkfD*D^d-"
        b"_!QK*O&B$CntTJpagHN(4~S~=({WH5dUTJ?Jhta7y4pKJ!p{JVH5(L2ED+qTL@w(7+`P=+K=WeF4%B39Y!`~<eMv"
        b"~vDkyM0w05C4;GTOM^-"
        b"DCM|y<Z=H`I@KS~u>(Sa1Sev^h_$um8H?16$!f*y`i^EDP1f*=hSeE4IzL=l{?rjm&uiCq=0AM-yzqOreE-ecub("
        b"f^PjB3?Y2McsOP*%MwyJ*3hBp3;4o{8^oDycZ1Hm#)`Du{KnJai#-"
        b"Pxl!XgCtR1VsctTkm(}m6~O9GWzHJ(vPznd6i%C%Y5tC$A`gm?|@WaMdcr4=}d{OMT21Vq+ChL;ZTjEs+Y1y?*B8"
        b">y_7c@b!$^c$#Ob{7)a9@d$s6&1ZdRM{<J~mE^5u<R%p~EL*BUvOc&J<&|5f#u`+`p0<XQ@+m^-"
        b"!3Ke<7iNks<Q&!vNMY7qe*<gA2P}SoJKJW|cUx<thO*k_diX^@7_=;X<nkbLVrl1zTr)+u^UB3vYy`;yGe^&lK<;"
        b"_rOb@UVhK;SYNR<s0FSmPTB+<evQc0<UX!gz>cZgLbR!LsZwtbYR"
    ),
}
_LEVELS = {
    **dict.fromkeys(("IQ2_XXS", "IQ2_XS", "IQ2_S"), (8, 25, 43)),
    "IQ3_XXS": (4, 12, 20, 28, 36, 44, 52, 62),
    "IQ3_S": (1, 3, 5, 7, 9, 11, 13, 15),
    "IQ1": (-1, 0, 1),
}


@cache
def _grid(name: str) -> NDArray[np.int8]:
    """(rows, 8) integers, or (rows, 4) for the IQ3 types."""
    levels = np.array(_LEVELS[name], np.int8)
    width = 8 if len(levels) == 3 else 4
    bits = np.unpackbits(np.frombuffer(decompress(b85decode(_BIT_MAPS[name]), -15), np.uint8))
    rows = np.flatnonzero(bits)[:, None]
    return levels[rows // len(levels) ** np.arange(width) % len(levels)]


def _signed(values: NDArray[np.int8], signs: Bytes) -> NDArray[np.int8]:
    """Negate the values (..., 8) whose bit in `signs` (...) is set."""
    bits = (signs[..., None] >> np.arange(8, dtype=np.uint8)) & np.uint8(1)
    return np.where(bits, -values, values)


def _seven_signs(index: Indices) -> Bytes:
    """Eight sign bits from seven: the number of negative values is even."""
    seven = (index & 127).astype(np.uint8)
    return seven | (np.bitwise_count(seven) & np.uint8(1)) << np.uint8(7)


def _four_sevens(words: NDArray[np.uint32]) -> Bytes:
    """The sign bits of the 32 values of a group, (n, groups, 4), from the low 28 bits of a word."""
    return _seven_signs(words[..., None] >> np.arange(0, 28, 7, dtype=np.uint32))


def _nibbles(packed: Bytes) -> Bytes:
    """(n, bytes) -> (n, 2 * bytes): the low nibble of each byte, then its high nibble."""
    return plane(packed, 1, 4).reshape(len(packed), -1)


def _odd_scales(factor: Floats, codes: Indices, divisor: int) -> Floats:
    """Scales are odd multiples of a block's super-scale: factor * (2 * code + 1) / divisor."""
    scales: Floats = factor * (codes.astype(np.float32) * 2 + 1) / np.float32(divisor)
    return scales


def unpack_iq2_xxs(blocks: Bytes) -> QuantizedGroups:
    """Byte 0: super-scale; 2-65: for each group of 32 values, four grid indices of 8 bits, four
    sign indices of 7 bits and a scale of 4 bits.
    """
    words = np.ascontiguousarray(blocks[:, 2:]).view("<u4").reshape(-1, 8, 2)
    index = np.ascontiguousarray(words[..., 0]).view(np.uint8).reshape(-1, 8, 4)
    values = _signed(_grid("IQ2_XXS")[index], _four_sevens(words[..., 1]))
    scales = _odd_scales(half(blocks, 0), words[..., 1] >> 28, 8)
    return QuantizedGroups(values.reshape(-1, 8, 32), scales)


def unpack_iq2_xs(blocks: Bytes) -> QuantizedGroups:
    """Byte 0: super-scale; 2-65: 9-bit grid index and 7-bit sign index per 8 values; 66-73: 4-bit
    scales per 16 values.
    """
    index = np.ascontiguousarray(blocks[:, 2:66]).view("<u2")
    values = _signed(_grid("IQ2_XS")[index & 511], _seven_signs(index >> 9))
    scales = _odd_scales(half(blocks, 0), _nibbles(blocks[:, 66:]), 8)
    return QuantizedGroups(values.reshape(-1, 16, 16), scales)


def unpack_iq2_s(blocks: Bytes) -> QuantizedGroups:
    """Byte 0: super-scale; 2-33: low 8 bits of the grid indices; 34-65: sign bits; 66-73: high 2
    bits of the indices; 74-81: 4-bit scales per 16 values.
    """
    high = plane(blocks[:, 66:74], 1, 2).reshape(-1, 32).astype(np.uint16)
    values = _signed(_grid("IQ2_S")[blocks[:, 2:34] | high << 8], blocks[:, 34:66])
    scales = _odd_scales(half(blocks, 0), _nibbles(blocks[:, 74:]), 8)
    return QuantizedGroups(values.reshape(-1, 16, 16), scales)


def unpack_iq3_xxs(blocks: Bytes) -> QuantizedGroups:
    """Byte 0: super-scale; 2-65: grid indices; 66-97: for each group of 32 values, four sign
    indices of 7 bits and a scale of 4 bits.
    """
    words = np.ascontiguousarray(blocks[:, 66:]).view("<u4")
    values = _grid("IQ3_XXS")[blocks[:, 2:66]].reshape(-1, 8, 4, 8)
    scales = _odd_scales(half(blocks, 0), words >> 28, 4)
    return QuantizedGroups(_signed(values, _four_sevens(words)).reshape(-1, 8, 32), scales)


def unpack_iq3_s(blocks: Bytes) -> QuantizedGroups:
    """Byte 0: super-scale; 2-65: low 8 bits of the grid indices; 66-73: their ninth bits; 74-105:
    sign bits; 106-109: 4-bit scales per 32 values.
    """
    ninth = plane(blocks[:, 66:74], 1, 1).reshape(-1, 64).astype(np.uint16)
    values = _grid("IQ3_S")[blocks[:, 2:66] | ninth << 8].reshape(-1, 32, 8)
    scales = _odd_scales(half(blocks, 0), _nibbles(blocks[:, 106:]), 1)
    return QuantizedGroups(_signed(values, blocks[:, 74:106]).reshape(-1, 8, 32), scales)


def _shifted(index: Indices, is_down: NDArray[np.bool_]) -> NDArray[np.int8]:
    """The ternary vectors of the IQ1 types in eighths. One eighth is added to each value, or
    subtracted where `is_down`.
    """
    shift = np.where(is_down, np.int8(-1), np.int8(1))
    return _grid("IQ1")[index] * np.int8(8) + shift[..., None]


def unpack_iq1_s(blocks: Bytes) -> QuantizedGroups:
    """Byte 0: super-scale; 2-33: low 8 bits of the grid indices; 34-49: for each group of 32
    values, the high 3 bits of four indices, a scale of 3 bits and the shift.
    """
    words = np.ascontiguousarray(blocks[:, 34:]).view("<u2")  # (n, 8)
    high = (words[..., None] >> np.arange(0, 12, 3, dtype=np.uint16)) & np.uint16(7)
    index = blocks[:, 2:34].reshape(-1, 8, 4) | high << 8
    values = _shifted(index, (words >> 15 == 1)[..., None])
    scales = _odd_scales(half(blocks, 0), words >> 12 & 7, 8)
    return QuantizedGroups(values.reshape(-1, 8, 32), scales)


def unpack_iq1_m(blocks: Bytes) -> QuantizedGroups:
    """Bytes 0-31: low 8 bits of the grid indices; 32-47: per index 3 high bits and the shift;
    48-55: four words, each with four scales of 3 bits and 4 bits of the super-scale.
    """
    words = np.ascontiguousarray(blocks[:, 48:]).view("<u2")  # (n, 4)
    pieces = words >> 12 << np.arange(0, 16, 4, dtype=np.uint16)
    factor = np.bitwise_or.reduce(pieces, axis=1, keepdims=True).view("<f2").astype(np.float32)
    small = (words[..., None] >> np.arange(0, 12, 3, dtype=np.uint16)) & np.uint16(7)
    scales = _odd_scales(factor, small.reshape(-1, 16), 8)
    extra = plane(blocks[:, 32:48], 1, 4).reshape(-1, 32).astype(np.uint16)
    values = _shifted(blocks[:, :32] | (extra & 7) << 8, extra >> 3 == 1)
    return QuantizedGroups(values.reshape(-1, 16, 16), scales)
