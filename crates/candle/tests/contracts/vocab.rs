use crate::common::{FLOATS, SIZES, bits, close, product, random, ranks, tolerance, values};
use brigade_candle::{VocabParallelEmbedding, VocabParallelHead, brigade::Error, brigade_error};
use candle_core::{D, DType, Device, Module, Tensor};
use rand::Rng;

/// Fewer words than ranks, ragged, and divisible.
const WORDS: [usize; 4] = [1, 3, 37, 40];

fn ids(words: usize, dims: &[usize], dtype: DType) -> Tensor {
    let mut rng = rand::rng();
    let len = dims.iter().product();
    let ids: Vec<u32> = (0..len)
        .map(|_| rng.random_range(0..words as u32))
        .collect();
    let ids = Tensor::from_vec(ids, dims, &Device::Cpu).unwrap();
    ids.to_dtype(dtype).unwrap()
}

#[test]
fn an_embedding_is_candles_lookup() {
    for (size, dtype) in SIZES.flat_map(|s| FLOATS.map(|d| (s, d))) {
        for words in WORDS {
            let table = random(&[words, 6], dtype);
            for (dims, of) in [
                (&[2, 5][..], DType::U32),
                (&[11], DType::I64),
                (&[0], DType::U32),
            ] {
                let ids = ids(words, dims, of);
                let flat = ids.flatten_all().unwrap();
                let want = table.index_select(&flat, 0).unwrap();
                let scattered = ranks(size, |p| {
                    let embedding = VocabParallelEmbedding::new(p, &table)?;
                    let got = embedding.forward(&ids)?;
                    assert_eq!(got.dims(), [dims, &[6]].concat());
                    assert_eq!(bits(&got), bits(&want), "{size} {dtype:?} {words}");
                    embedding.forward_scattered(&ids, None)
                });
                assert_eq!(bits(&Tensor::cat(&scattered, 0).unwrap()), bits(&want));
            }
        }
    }
}

#[test]
fn a_word_that_nobody_has_is_named_on_every_rank() {
    let table = random(&[10, 4], DType::F32);
    for (id, told) in [(10, "10"), (-1, "-1"), (i64::MAX, "9223372036854775807")] {
        let ids = Tensor::new(&[3i64, id, 2], &Device::Cpu).unwrap();
        let errors = ranks(3, |p| {
            let error = VocabParallelEmbedding::new(p, &table)?.forward(&ids);
            let error = error.expect_err("a word that is not there");
            Ok(brigade_error(&error).unwrap().clone())
        });
        for error in errors {
            let Error::Invalid { field, got, .. } = error else {
                panic!("{error}");
            };
            assert_eq!((field, got.as_str()), ("ids", told));
        }
    }
}

#[test]
fn a_head_scores_all_words_and_finds_the_greatest() {
    for (size, dtype) in SIZES.flat_map(|s| FLOATS.map(|d| (s, d))) {
        for words in WORDS {
            let (weight, x) = (random(&[words, 9], dtype), random(&[2, 3, 9], dtype));
            let want = product(&x, &weight);
            let name = format!("{size} ranks, {dtype:?}, {words} words");
            ranks(size, |p| {
                let head = VocabParallelHead::new(p, &weight)?;
                let scores = head.forward(&x)?;
                assert_eq!(scores.dims(), [2, 3, words]);
                close(&scores, &want, tolerance(dtype), &name);
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
                assert_eq!(found.flatten_all()?.to_vec1::<u32>()?, greatest, "{name}");
                Ok(())
            });
        }
    }
}

#[test]
fn of_equal_scores_the_lowest_word_wins_and_nan_has_none() {
    let ones = Tensor::ones((7, 2), DType::F32, &Device::Cpu).unwrap();
    let mut poisoned = vec![1f32; 14];
    poisoned[9] = f32::NAN;
    let poisoned = Tensor::from_vec(poisoned, (7, 2), &Device::Cpu).unwrap();
    let low = Tensor::full(f32::NEG_INFINITY, (7, 2), &Device::Cpu).unwrap();
    let x = Tensor::ones((1, 2), DType::F32, &Device::Cpu).unwrap();
    for (weight, want) in [(&ones, 0), (&poisoned, 7), (&low, 0)] {
        for size in SIZES {
            let found = ranks(size, |p| VocabParallelHead::new(p, weight)?.argmax(&x));
            for found in found {
                assert_eq!(found.to_vec1::<u32>().unwrap(), [want], "{size} ranks");
            }
        }
    }
}

#[test]
fn an_embedding_and_a_head_share_their_table() {
    let table = random(&[13, 4], DType::F32);
    let ids = ids(13, &[6], DType::U32);
    let want = table.index_select(&ids, 0).unwrap();
    let want = product(&want, &table);
    ranks(3, |p| {
        let embedding = VocabParallelEmbedding::new(p, &table)?;
        let head = VocabParallelHead::from_shard(p, embedding.table(), 13)?;
        let scores = head.forward(&embedding.forward(&ids)?)?;
        close(&scores, &want, 1e-5, "shared");
        assert_eq!(scores.dim(D::Minus1)?, 13);
        // Of fourteen words, rank 1 would have five.
        let other = VocabParallelHead::from_shard(p, embedding.table(), 14);
        assert_eq!(other.is_err(), p.rank() == 1);
        Ok(())
    });
}
