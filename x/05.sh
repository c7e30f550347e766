# weights that are a link to nowhere (a hub cache whose blobs were cleaned, an unmounted disk): trace and mappings end in a traceback
cd /tmp/w/s17/x; export PYTHONPATH=/tmp/w/s17/lead OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 PATH=/work/main/.venv/bin:$PATH
rm -rf t6/z; cp -r /tmp/w/s17/lead/golden/reference t6/z 2>/dev/null || cp -r /tmp/w/s17/lead/golden/reference t6/z; rm -f t6/z/*.safetensors; ln -s /nowhere/blob t6/z/model.safetensors
for v in inspect trace mappings; do echo "== $v (expected: one line, as inspect says)"; python -m compressor $v t6/z 2>&1 | tail -1; done
rm t6/z/model.safetensors; : > t6/z/model.safetensors
for v in inspect trace mappings; do echo "== $v, weight file of 0 bytes (expected: one line, as inspect says)"; python -m compressor $v t6/z 2>&1 | head -2|cut -c1-160; done
