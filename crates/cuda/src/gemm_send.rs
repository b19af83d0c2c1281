//! What a product of tiles sends itself, by the warps of `kernels/gemm_send.cuh`.

use brigade_kernels::GemmFlagsParams;

/// Most bytes that a product sends itself, over all ranks. More holds up what it loads.
pub(crate) const FEW_BYTES: usize = 8 << 20;

/// Own rows: values, and scales where there are some.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Sends {
    /// Where they are.
    pub(crate) from: [u64; 2],
    /// Where they go in every rank's memory, in bytes.
    pub(crate) to: [u64; 2],
    pub(crate) bytes: [u64; 2],
    /// By which word others hear of them.
    pub(crate) word: u32,
    /// Whether they go to their place in this rank's memory, too.
    pub(crate) keeps_own: bool,
}

impl Sends {
    /// To one rank.
    pub(crate) fn total_bytes(&self) -> usize {
        self.bytes.iter().sum::<u64>() as usize
    }

    pub(crate) fn tell(&self, parameters: &mut GemmFlagsParams) {
        parameters.sends = 1;
        parameters.send_from = self.from;
        parameters.send_to = self.to;
        parameters.send_bytes = self.bytes;
        parameters.send_word = self.word;
        parameters.keeps_own = u32::from(self.keeps_own);
    }
}

/// Where a part goes that is not added up here.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sent {
    /// Its owner's memory, or 0 if copy engines carry it.
    pub(crate) to: u64,
    /// Who hears that all of it is made, and there if it was sent: its owner, or this rank.
    pub(crate) told: usize,
    /// By which word.
    pub(crate) word: u32,
}

impl Sent {
    pub(crate) fn tell(&self, part: usize, parameters: &mut GemmFlagsParams) {
        parameters.part_to[part] = self.to;
        parameters.part_peer[part] = self.told as u32;
        parameters.part_tells[part] = self.word;
    }
}
