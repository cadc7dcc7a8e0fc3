export PYTHONPATH=src PYTHONUNBUFFERED=1 OMP_NUM_THREADS=4 FOURFOLD_TIMEOUT=60
python3 -c "import torch,typer,rich,hypothesis,pytest; print(torch.__version__)"
nvidia-smi --query-gpu=name,memory.total --format=csv
timeout 60 python3 .scratch/cap.py
FF="python3 -c 'from fourfold.cli.main import main; main()'"
ff() { echo "## $*"; timeout 100 python3 -c 'import sys; from fourfold.cli.main import main; main()' "$@" 2>&1 | tail -16; }
ff verify resnet50,image=64,width=16,classes=10 --strategy data --ranks 2 --batch 4 --no-predict --device cuda --share-gpu
ff verify unet3d,size=16,width=2 --strategy spatial --ranks 2 --batch 4 --no-predict --device cuda --share-gpu
ff verify gpt2,layers=2,width=64,heads=4,length=32,vocabulary=100 --strategy fsdp --ranks 2 --batch 4 --no-predict --device cuda --share-gpu --precision bf16
ff verify vgg16-cifar,width=16 --strategy data --ranks 2 --batch 4 --no-predict --device cuda
ff train vgg16-cifar,width=16 --strategy filter --ranks 2 --batch 8 --steps 4 --no-predict --share-gpu
(timeout 200 python3 benchmarks/gpu_matrix.py --out $OUT/gm.json 2>&1 | tail -40)
(timeout 150 python3 benchmarks/gpu_single.py "resnet50 b64" "gpt2 8x1024" "unet3d 128^3 b2" "vit b64" --precision bf16 --out $OUT/gs.json 2>&1 | tail -20)
