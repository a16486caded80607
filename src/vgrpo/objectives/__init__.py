"""What can be optimised, by name. One file per family; each can be read beside another."""

OBJECTIVES = {
    "vgrpo": "vgrpo.objectives.vgrpo:VGRPO",
    "elbo": "vgrpo.objectives.fpo:ELBO",
    "fpo": "vgrpo.objectives.fpo:FPO",
    "awm": "vgrpo.objectives.awm:AWM",
    "nft": "vgrpo.objectives.nft:NFT",
    "ddpo": "vgrpo.objectives.policy_gradient:DDPO",
    "flow_grpo": "vgrpo.objectives.policy_gradient:FlowGRPO",
    "flow_grpo_fast": "vgrpo.objectives.policy_gradient:FlowGRPOFast",
    "dance_grpo": "vgrpo.objectives.policy_gradient:DanceGRPO",
    "mix_grpo": "vgrpo.objectives.policy_gradient:MixGRPO",
    "branch_grpo": "vgrpo.objectives.branch:BranchGRPO",
}
