import sys; sys.path[:0]=['tests','.','tools']
import numpy as np, cupy
from cuda_cases import OnDevice
from edgekv.kvcache import CacheSpec
from edgekv.kvcache.geometry import Geometry, Workspace
from edgekv.kernels.memory import to_host
from edgekv.kernels import numpy_kernels
from edgekv.kernels.cuda import tiled_planes, attend
dev=OnDevice.open("gpu"); d=dev.driver
def case(H, n, text="onebit"):
    spec=CacheSpec.parse(text); rng=np.random.default_rng(0); N=lambda *s: rng.standard_normal(s,dtype=np.float32)
    cache=spec.scheme(Geometry(H,H,128,n+256,layer=2,n_layers=32),spec.knobs); cache.allocate(dev.kernels,Workspace(d))
    off=2*N(H,1,128)
    for a in range(0,n,1024):
        m=min(1024,n-a); cache.extend(d.upload(N(H,m,128)+off), d.upload(N(H,m,128)))
    q,k,v=N(H,1,128)*np.float32(2/np.sqrt(128)),N(H,1,128),N(H,1,128)
    def run():
        r=to_host(cache.attend(d.upload(q),d.upload(k),d.upload(v))).copy(); cache.advance(-1); return r
    d.has_whole_tiles=False; e=run(); e2=run(); d.has_whole_tiles=True
    for held in (2,3):
        for tiles in (1,3):
            tiled_planes.HELD=tiled_planes.Held(held,2); attend.EXACT_TILES=tiles
            rs=[run() for _ in range(3)]
            err=[float(np.linalg.norm(r-e)/np.linalg.norm(e)) for r in rs]
            heads=np.linalg.norm((rs[0]-e)[:,0],axis=1)/np.linalg.norm(e[:,0],axis=1)
            print(text,H,n,"held",held,tiles,"errors",err,"old vs old",float(np.abs(e-e2).max()),"bad heads",np.flatnonzero(heads>0.01).tolist()[:40], "same", bool((rs[0]==rs[1]).all()), flush=True)
    attend.EXACT_TILES=1
for H,n in ((2,384),(2,1024),(2,2048),(2,8192),(32,512),(32,2048),(32,8192)): case(H,n)
case(32,8192,"planes")
