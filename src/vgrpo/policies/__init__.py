"""Model families. A pipeline class name leads to the file that knows its family; `pipeline.py` is what all share."""

POLICIES = {
    "StableDiffusion3Pipeline": "vgrpo.policies.sd3:StableDiffusion3",
    "FluxPipeline": "vgrpo.policies.flux:Flux",
    "StableDiffusionPipeline": "vgrpo.policies.sd15:StableDiffusion",
}
