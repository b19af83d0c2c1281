use super::{
    Hold, Theme, World,
    oracle::{FLOATS, bits, cat, close, home, product, put, random, values},
};
use brigade_candle::{
    ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding, VocabParallelHead,
    brigade::{Activation, Error},
    brigade_error,
};
use candle_core::{D, DType, Device, Module, Result, Tensor};
use rand::Rng;

pub const THEMES: &[Theme] = &[Theme {
    name: "vocab",
    sizes: 1..=4,
    hold: Hold::Everywhere,
    contracts: contracts![
        an_embedding_is_candles_lookup,
        a_word_that_nobody_has_is_named_or_seen_on_every_rank,
        a_head_scores_all_words_and_finds_the_greatest,
        of_equal_scores_the_lowest_word_wins_and_nan_has_none,
        an_embedding_and_a_head_share_their_table,
        a_step_of_a_model_chooses_the_words_of_one_device,
    ],
}];

/// Fewer words than ranks, ragged, and divisible.
const WORDS: [usize; 4] = [1, 3, 37, 40];

/// Tables or weights with so many columns, of every type and length.
fn tables(world: &World, hidden: usize) -> Vec<Tensor> {
    let words = WORDS.map(|words| world.features(words));
    let all = FLOATS.map(|dtype| words.map(|words| random(&[words, hidden], dtype)));
    all.into_iter().flatten().collect()
}

fn ids(words: usize, dims: &[usize], dtype: DType) -> Tensor {
    let mut rng = rand::rng();
    let len = dims.iter().product();
    let ids: Vec<u32> = (0..len)
        .map(|_| rng.random_range(0..words as u32))
        .collect();
    let ids = Tensor::from_vec(ids, dims, &Device::Cpu).unwrap();
    ids.to_dtype(dtype).unwrap()
}

fn an_embedding_is_candles_lookup(world: &World) {
    for (dims, of) in [
        (&[2, 5][..], DType::U32),
        (&[11], DType::I64),
        (&[0], DType::U32),
    ] {
        let with_ids = |table: Tensor| (ids(table.dims()[0], dims, of), table);
        let cases: Vec<_> = tables(world, 6).into_iter().map(with_ids).collect();
        let got = world.ranks(|p| {
            let made = cases.iter().map(|(ids, table)| {
                let ids = put(p, ids)?;
                let embedding = VocabParallelEmbedding::new(p, &put(p, table)?)?;
                let all = embedding.forward(&ids)?;
                assert_eq!(all.dims(), [dims, &[6]].concat());
                Ok((all, embedding.forward_scattered(&ids, None)?))
            });
            made.collect::<Result<Vec<_>>>()
        });
        for (at, (ids, table)) in cases.iter().enumerate() {
            let flat = ids.flatten_all().unwrap();
            let want = bits(&table.index_select(&flat, 0).unwrap());
            let case = format!("{:?} of {:?}", table.dtype(), table.dims());
            let (all, own): (Vec<_>, Vec<_>) = got.iter().map(|made| made[at].clone()).unzip();
            assert!(all.iter().all(|all| bits(all) == want), "{case}");
            assert_eq!(bits(&cat(&own, 0)), want, "{case}");
        }
    }
}

/// Where the host does not see ids, the row is NaN.
fn a_word_that_nobody_has_is_named_or_seen_on_every_rank(world: &World) {
    let table = random(&[world.features(10), 4], DType::F32);
    let words = table.dims()[0] as i64;
    for id in [words, -1, i64::MAX] {
        let ids = Tensor::new(&[3i64, id, 2], &Device::Cpu).unwrap();
        world.ranks(|p| {
            let embedding = VocabParallelEmbedding::new(p, &put(p, &table)?)?;
            let made = embedding.forward(&put(p, &ids)?);
            if !p.place().is_cpu() {
                let nan: Vec<bool> = values(&made?).iter().map(|v| v.is_nan()).collect();
                assert_eq!(nan, [[false; 4], [true; 4], [false; 4]].concat());
                return Ok(());
            }
            let error = made.expect_err("a word that is not there");
            let Some(Error::Invalid { field, got, .. }) = brigade_error(&error) else {
                panic!("{error}");
            };
            assert_eq!((*field, got), ("ids", &id.to_string()));
            Ok(())
        });
    }
}

fn a_head_scores_all_words_and_finds_the_greatest(world: &World) {
    let with_x = |weight: Tensor| (random(&[2, 3, 9], weight.dtype()), weight);
    let cases: Vec<_> = tables(world, 9).into_iter().map(with_x).collect();
    let wants: Vec<_> = cases.iter().map(|(x, w)| product(x, w)).collect();
    world.ranks(|p| {
        for ((x, weight), want) in cases.iter().zip(&wants) {
            let (dtype, words) = (weight.dtype(), weight.dims()[0]);
            let name = format!("{dtype:?}, {words} words");
            let x = put(p, x)?;
            let head = VocabParallelHead::new(p, &put(p, weight)?)?;
            let scores = head.forward(&x)?;
            assert_eq!(scores.dims(), [2, 3, words]);
            close(&scores, want, world.tolerance(dtype), &name);
            // By the scores that were rounded: the lowest of the greatest.
            let greatest: Vec<u32> = values(&scores)
                .chunks(words)
                .map(|row| {
                    let most = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                    row.iter().position(|&s| s == most).unwrap() as u32
                })
                .collect();
            let found = head.argmax(&x)?;
            assert_eq!((found.dims(), found.dtype()), (&[2, 3][..], DType::U32));
            let found = home(&found).flatten_all()?.to_vec1::<u32>()?;
            assert_eq!(found, greatest, "{name}");
        }
        Ok(())
    });
}

fn of_equal_scores_the_lowest_word_wins_and_nan_has_none(world: &World) {
    let words = world.features(7);
    let full = |value: f32| Tensor::full(value, (words, 2), &Device::Cpu).unwrap();
    let mut poisoned = vec![1f32; 2 * words];
    poisoned[9] = f32::NAN;
    let poisoned = Tensor::from_vec(poisoned, (words, 2), &Device::Cpu).unwrap();
    let x = Tensor::ones((1, 2), DType::F32, &Device::Cpu).unwrap();
    world.ranks(|p| {
        let x = put(p, &x)?;
        for (weight, want) in [
            (&full(1.0), 0),
            (&poisoned, words as u32),
            (&full(f32::NEG_INFINITY), 0),
        ] {
            let found = VocabParallelHead::new(p, &put(p, weight)?)?.argmax(&x)?;
            assert_eq!(home(&found).to_vec1::<u32>()?, [want]);
        }
        Ok(())
    });
}

fn an_embedding_and_a_head_share_their_table(world: &World) {
    let words = world.features(13);
    let table = random(&[words, 4], DType::F32);
    let ids = ids(words, &[6], DType::U32);
    let want = table.index_select(&ids, 0).unwrap();
    let want = product(&want, &table);
    world.ranks(|p| {
        let embedding = VocabParallelEmbedding::new(p, &put(p, &table)?)?;
        let head = VocabParallelHead::from_shard(p, embedding.table(), words)?;
        let scores = head.forward(&embedding.forward(&put(p, &ids)?)?)?;
        close(&scores, &want, 1e-5, "shared");
        assert_eq!(scores.dim(D::Minus1)?, words);
        // With one word more, a rank has one more.
        let other = VocabParallelHead::from_shard(p, embedding.table(), words + 1);
        assert_eq!(other.is_err(), p.rank() == words % p.size());
        Ok(())
    });
}

fn a_step_of_a_model_chooses_the_words_of_one_device(world: &World) {
    let (words, inner, hidden) = (world.features(103), world.features(90), 64);
    let table = random(&[words, hidden], DType::F32);
    let (up, down) = (
        random(&[inner, hidden], DType::F32),
        random(&[hidden, inner], DType::F32),
    );
    let ids = Tensor::new(&[5u32, 102, 0, 51, 52], &Device::Cpu).unwrap();
    let one = || -> Result<Tensor> {
        let x = table.index_select(&ids, 0)?;
        let y = x.matmul(&up.t()?)?.silu()?.matmul(&down.t()?)?;
        (x + y)?.matmul(&table.t()?)?.argmax(1)
    };
    let want = one().unwrap().to_vec1::<u32>().unwrap();
    world.ranks(|p| {
        let embedding = VocabParallelEmbedding::new(p, &put(p, &table)?)?;
        let head = VocabParallelHead::from_shard(p, embedding.table(), words)?;
        let up = ColumnParallelLinear::new(p, &put(p, &up)?, None)?;
        let up = up.with_activation(Activation::Silu);
        let down = RowParallelLinear::new(p, &put(p, &down)?, None)?;
        let x = embedding.forward(&put(p, &ids)?)?;
        let x = (&x + down.forward(&up.forward(&x)?)?)?;
        assert_eq!(home(&head.argmax(&x)?).to_vec1::<u32>()?, want);
        assert_eq!(head.forward(&x)?.dims(), [5, words]);
        Ok(())
    });
}
