//! Values that sums must treat with care: bits of a meaning of their own.

use super::{Case, OPS, Place, uneven};
use crate::{gather_linear::config, layer::FLOATS, suite::World};
use brigade_device::{AllReduceAlgorithm, DataType};
use rand::{Rng, rngs::StdRng};

/// Signed zeros, subnormals, infinities, NaNs of any payload, and a one.
pub(crate) const SPECIAL: [f32; 14] = [
    0.0,
    -0.0,
    1e-40,
    -1e-40,
    6e-8,
    -6e-8,
    f32::MIN_POSITIVE,
    f32::MAX,
    f32::MIN,
    f32::INFINITY,
    f32::NEG_INFINITY,
    f32::NAN,
    f32::from_bits(0xFFC0_1234),
    1.0,
];

/// Values with bits of their own: signed zeros, subnormals, infinities, NaNs of any payload.
pub(super) fn special_values(world: &World, choice: Option<AllReduceAlgorithm>) {
    let mut rng = world.rng();
    let mut cases = vec![];
    for op in OPS {
        for dtype in FLOATS {
            for place in [Place::OverInput, Place::Beside, Place::Widened] {
                let mut draw = || match rng.random_range(0..20) {
                    i @ 0..14 => SPECIAL[i],
                    _ => uneven(&mut rng),
                };
                let mut values = || (0..1500).map(|_| draw()).collect();
                let inputs = (0..world.size).map(|_| values()).collect();
                cases.push(Case::new(dtype, op, place, inputs));
                let inputs = patterns(&mut rng, world.size, dtype);
                cases.push(Case::stored(dtype, op, place, inputs));
            }
        }
    }
    world.run(&config(), move |rank| {
        for case in &cases {
            case.run(rank, choice);
        }
    });
}

/// Bits that a protocol might take for something else: all ones and its neighbours, in the whole of 32 bits and in halves
/// of them; and what sums keep as it is, or make canonical. One rank has them, and the others -0, which adds nothing.
fn patterns(rng: &mut StdRng, size: usize, dtype: DataType) -> Vec<Vec<u8>> {
    const PATTERNS: [u32; 26] = [
        0xFFFF_FFFF,
        0xFFFF_FFFE,
        0xFFFF_FFFD,
        0xFFFE_FFFF,
        0xFFFE_FFFE,
        0x7FFF_FFFF,
        0xFFFF_7FFF,
        0x7FFF_7FFF,
        0xFFFF_0000,
        0x0000_FFFF,
        0x7FC0_0000,
        0x7FC0_0001,
        0xFFC0_0000,
        0x7FA0_0000,
        0x7FC0_7FC0,
        0x7E00_7E00,
        0x7D00_FD00,
        0x8000_0000,
        0x8000_8000,
        0x0000_0000,
        0x0000_0001,
        0x0001_8001,
        0x007F_FFFF,
        0x7F80_FF80,
        0x7C00_FC00,
        0xFF7F_FFFF,
    ];
    let zero: u32 = match dtype {
        DataType::F32 => 0x8000_0000,
        _ => 0x8000_8000,
    };
    let mut lanes = vec![vec![]; size];
    for _ in 0..750 {
        let (pattern, whose) = (PATTERNS[rng.random_range(0..26)], rng.random_range(0..size));
        for (rank, lanes) in lanes.iter_mut().enumerate() {
            let lane = if rank == whose { pattern } else { zero };
            lanes.extend(lane.to_ne_bytes());
        }
    }
    lanes
}
