"""A real cubin: one kernel of eight registers and 512 bytes of static shared memory, made by ptxas 13.0 -arch=sm_90.

From this source, with `ptxas -arch=sm_90 k.ptx -o k.cubin`: load a float of global memory, add 1, store it to
`.shared .align 4 .b8 tile[512]`, wait at a barrier, load it and store it back, in `.visible .entry add_one`.
"""

from __future__ import annotations

import base64
import zlib

_CUBIN = r"""
c-rk&&2Q936n|sSZro(q4It5tT8dM(QjmgKAPUQgKtkI{1gcg-
2no3+>#!?!?Un7U)_}w&Ae2J|s`v*G;@ErD3qtCR6MsU5dO(N+2Tm33c4j<Yd&hQC5VRb4()i8%=6(6in~!TJPJSgJbWDMOBzOP_
B05_PczHD7_#EWtpb9ydgY8sObL+0>c*X_N3%TElaow$3wJvCu?U|a@(Y#9yYsHSn%d33c(FUDmyVW*4&^)v2X-
2K4+m<<y7y{h7;h42F$T3~h>5xtZNWUrAB8VYCHS@yiMSaCFTETn*FoqEtr_pR)bc}YLjoOaw*`D9#bGGGrhUHZT9{w%8e<=-
f`F+c5Y4*yBYkHN8T<f~k(FgKNCzkX;Ua#mzvthUyzx-dXQ2g&+XQlR%CX?zH=?KH~3H&_6w<Yka3@;||+oVm##+dU5q^WmH=|Q0
+G=ZpnoWK_uKAONyg6|lQ;_PvoEhaynkna=vBG#uw{9UEIR9Nfvra<Yh^`;co4P>S>avJ)=Rr;YZ7q}Mbk@h2Lk4FGbompI1Jf_a
uPMe%l(XW#!m?iB83beg0DYE(1nxWE?Z!`_BVOy$a+f8>`B{gCiuBje4q*bQXGn8r7DjZ*JG;8WIQPLUY(C_|0-*mJ?voi;04j-
7&E3mJls{0IQxvsh`{YXU(W2EQjQ(27h9IVq{+OM#TQyIKn8Dt;ti2Bk;q)7;*Tn^+Bgd}21$|JyIN>mGnabWM`LX^B0lOTUf*65
QyNGB1<IzsqU48PO*not0bDlkU+;}Yr5Vo+jhM)}{I|Hb($&KCyv0i;yR+oSa>s6R-
~lM+n$d~eZBpcToy)Q1~9h|i1g>t(XX*7=yof7z9Cn8kT(1Rm{yHJ_x7ZGg`TaIXlzh4wZA{q-
)6Hq{>`_{qUc|LDV8C3vz2COuY>N7?-2)3D(K%Li6Sgv8(OE3r-
YyaYG=T%Vbv^HW8*N&Hif`HArYwYTICs$7O=CHUHZ#d6&5Uzg!w3Ceyf8UMrh1AU-(L5SUNNt)w)8f|`sjb-TH;eyw<(BH|=E|JR
IsEVTVEj+*3Jm-(nuT`k>v!lMn6}*?<OJW#zx&D1Y9;dt~MuL0|nO@+>naanx@Lmz``GB>>_-
kB0yu0NL|KE{zGev(x(9eqh68AqR;6HQyZ({zprRe_|<TT;`rSSh^{NXzO!ZFc*S$Lv_{>Alwx`lo@rjJwf&-
0oPUxdB<@S8{GS6MIReMoK2iwOuF#SEwA?=}~ev-G#9-(4ucj%VnXrOo~4Id-;~?yro7xe|-
xP4#lI{ARr|dntPPP4Y7ILn(1)>4o_Tc_{V|sxPG1
"""

CUBIN = zlib.decompress(base64.b85decode("".join(_CUBIN.split())))
