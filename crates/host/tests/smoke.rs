//! temp
use brigade_device::*;
use brigade_host::*;
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};
struct Hub { n: usize, m: Mutex<(u64, Vec<Option<Vec<u8>>>, Vec<Vec<u8>>)>, c: Condvar }
struct B(usize, Arc<Hub>);
impl Bootstrap for B {
    fn rank(&self) -> usize { self.0 }
    fn size(&self) -> usize { self.1.n }
    fn all_gather(&self, mine: &[u8], _w: Duration) -> Result<Vec<Vec<u8>>> {
        let mut g = self.1.m.lock().unwrap();
        let round = g.0;
        g.1[self.0] = Some(mine.to_vec());
        if g.1.iter().all(|x| x.is_some()) {
            g.2 = g.1.iter_mut().map(|x| x.take().unwrap()).collect();
            g.0 += 1;
            self.1.c.notify_all();
            return Ok(g.2.clone());
        }
        while g.0 == round { g = self.1.c.wait(g).unwrap(); }
        Ok(g.2.clone())
    }
}
fn ranks<R: Send>(n: usize, f: impl Fn(usize, Arc<HostDevice>, Stream, Comm) -> R + Sync) -> Vec<R> {
    let hub = Arc::new(Hub { n, m: Mutex::new((0, vec![None; n], vec![])), c: Condvar::new() });
    std::thread::scope(|s| {
        let hs: Vec<_> = (0..n).map(|r| { let hub = hub.clone(); let f = &f; s.spawn(move || {
            let d = HostDevice::new().unwrap();
            let on = d.stream(0).unwrap();
            let mut cfg = CommConfig::new(ParallelMode::Tp);
            cfg.deadline = Duration::from_secs(5);
            cfg.first_deadline = Duration::from_secs(5);
            let c = d.clone().join(&B(r, hub), &cfg).unwrap();
            f(r, d, on, c)
        })}).collect();
        hs.into_iter().map(|h| h.join().unwrap()).collect()
    })
}
#[test]
fn smoke() {
    for n in 1..=5 {
        for mode in [OverlapMode::Off, OverlapMode::Ring, OverlapMode::Pull, OverlapMode::Chunked { pieces: 3 }] {
            let t = Instant::now();
            ranks(n, |r, d, on, c| {
                let rows: Vec<usize> = (0..n).map(|i| if i == 1 { 0 } else { i + 3 }).collect();
                let m: usize = rows.iter().sum();
                let k = 7; let nn = 5;
                let val = |row: usize, col: usize| ((row * 31 + col * 17) % 13) as f32 - 6.0;
                let first: usize = rows[..r].iter().sum();
                let mine: Vec<f32> = (0..rows[r]).flat_map(|i| (0..k).map(move |j| val(first + i, j))).collect();
                let w: Vec<f32> = (0..k * nn).map(|i| (i % 5) as f32 - 2.0).collect();
                let x = d.upload(&on, &mine, &[rows[r], k]).unwrap();
                let w_ = d.upload(&on, &w, &[k, nn]).unwrap();
                for _ in 0..50 {
                    let mut l = c.lease(&on).unwrap();
                    let mut p = AllGatherLoraLinearParams::new(Chunk::Copy((&x).into()), &rows, &w_);
                    p.choice = Some(mode);
                    let out = l.all_gather_lora_linear(p).unwrap();
                    let got: Vec<f32> = d.download(&on, out.d.as_ref().unwrap().view()).unwrap();
                    let a: Vec<f32> = d.download(&on, out.a.operand().unwrap().kernel()).unwrap();
                    for i in 0..m { for j in 0..k { assert_eq!(a[i * k + j], val(i, j)); } }
                    for i in 0..m { for j in 0..nn {
                        let want: f32 = (0..k).map(|q| val(i, q) * w[q * nn + j]).sum();
                        assert_eq!(got[i * nn + j], want, "mode {mode} n {n} r {r} i {i} j {j}");
                    } }
                    drop(out);
                    // twin
                    if mode != OverlapMode::Pull {
                        let full: Vec<f32> = (0..m * k).map(|i| val(i / k, i % k) + r as f32).collect();
                        let xf = d.upload(&on, &full, &[m, k]).unwrap();
                        let mut p = LoraLinearReduceScatterParams::new(&xf, &rows, &w_);
                        p.choice = Some(mode);
                        let out = l.lora_linear_reduce_scatter(p).unwrap();
                        let got: Vec<f32> = d.download(&on, out.d.unwrap().view()).unwrap();
                        for i in 0..rows[r] { for j in 0..nn {
                            let want: f32 = (0..n).map(|rr| (0..k).map(|q| (val(first + i, q) + rr as f32) * w[q * nn + j]).sum::<f32>()).sum();
                            assert_eq!(got[i * nn + j], want, "twin mode {mode} n {n} r {r} i {i} j {j}");
                        } }
                    }
                    let mut y = d.upload(&on, &vec![r as f32 + 1.0; 100_000], &[100_000]).unwrap();
                    l.all_reduce(AllReduceParams { data: y.view_mut(), from: None, op: ReduceOp::Sum, choice: None }).unwrap();
                    let got: Vec<f32> = d.download(&on, y.view()).unwrap();
                    assert!(got.iter().all(|&v| v == (n * (n + 1) / 2) as f32));
                    l.barrier().unwrap();
                }
            });
            println!("n {n} {mode} {:?}", t.elapsed());
        }
    }
}
#[test]
fn faults() {
    let errs = ranks(3, |r, d, on, c| {
        let mut l = c.lease(&on).unwrap();
        l.barrier().unwrap();
        if r == 1 { return None; }
        let mut y = d.upload(&on, &[1.0f32; 10], &[10]).unwrap();
        let e = l.all_reduce(AllReduceParams { data: y.view_mut(), from: None, op: ReduceOp::Sum, choice: None }).unwrap_err();
        Some(e.to_string())
    });
    println!("{errs:?}");
    let errs = ranks(3, |r, d, on, c| {
        let mut l = c.lease(&on).unwrap();
        l.barrier().unwrap();
        let n = if r == 1 { 11 } else { 10 };
        let mut y = d.upload(&on, &vec![1.0f32; n], &[n]).unwrap();
        let e = l.all_reduce(AllReduceParams { data: y.view_mut(), from: None, op: ReduceOp::Sum, choice: None }).unwrap_err();
        drop(l);
        c.reset(Duration::from_secs(5)).unwrap();
        let mut l = c.lease(&on).unwrap();
        l.barrier().unwrap();
        let mut y = d.upload(&on, &vec![1.0f32; 10], &[10]).unwrap();
        l.all_reduce(AllReduceParams { data: y.view_mut(), from: None, op: ReduceOp::Sum, choice: None }).unwrap();
        Some(e.to_string())
    });
    println!("{errs:?}");
}
