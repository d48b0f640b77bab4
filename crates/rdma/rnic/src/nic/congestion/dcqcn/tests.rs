use super::*;

const LINE_BPS: u64 = 100_000_000_000;

fn at_ns(ns: u64) -> Time {
    Time::from_ps(ns * PS_PER_NS)
}

fn gbps(rate: &DcqcnRate) -> f64 {
    f64::from(rate.bps) / 1e9
}

/// Rates have 24 significant bits.
#[track_caller]
fn assert_close(found: f64, expected: f64) {
    assert!((found - expected).abs() < 1e-4 * expected, "{found} {expected}");
}

#[test]
fn the_paper_halves_the_rate_at_the_first_notification_at_once_and_alpha_decays_after() {
    let constants = Dcqcn::published(LINE_BPS);
    let mut rate = DcqcnRate::new(&constants);
    assert_eq!(rate.pause(1250), Span::from_ps(100_000));
    rate.on_cnp(at_ns(0), &constants);
    assert_close(gbps(&rate), 50.0);
    // Alpha decays by 255/256 in each period of 55 us; the rate recovers half of the difference in each.
    for periods in 1..=5 {
        rate.advance(at_ns(55_000 * periods), &constants);
        let alpha = (255.0_f64 / 256.0).powi(periods as i32);
        assert!((f64::from(rate.alpha) - alpha).abs() < 1e-5, "{periods}: {}", rate.alpha);
        let expected = 100.0 - 50.0 / f64::from(1 << periods);
        assert!((gbps(&rate) - expected).abs() < 1e-3, "{periods}: {}", gbps(&rate));
    }
}

#[test]
fn the_target_rises_after_the_recoveries_by_the_step_and_then_by_the_hyper_step() {
    // From 1 Gb/s, with a target of 1 Gb/s, so that each increase is half a step.
    let constants = Dcqcn { byte_counter: 0, ..Dcqcn::published(LINE_BPS) };
    let mut rate = DcqcnRate::new(&constants);
    rate.on_cnp(at_ns(0), &constants);
    (rate.bps, rate.target_bps) = (1e9, 1e9);
    let mut targets = Vec::new();
    for period in 1..=9 {
        rate.advance(at_ns(55_000 * period), &constants);
        targets.push((f64::from(rate.target_bps) / 1e6).round());
    }
    assert_eq!(targets, [1000.0, 1000.0, 1000.0, 1000.0, 1000.0, 1040.0, 1240.0, 1440.0, 1640.0]);
    // With a byte counter that never expires, the hyper step never applies.
    let constants = Dcqcn { byte_counter: u32::MAX, ..constants };
    rate.on_cnp(at_ns(600_000), &constants);
    (rate.bps, rate.target_bps) = (1e9, 1e9);
    rate.advance(at_ns(600_000 + 55_000 * 9), &constants);
    assert_eq!((f64::from(rate.target_bps) / 1e6).round(), 1160.0);
}

#[test]
fn the_byte_counter_raises_the_rate_as_the_timer_does() {
    let constants = Dcqcn { byte_counter: 1_000_000, increase_ns: u32::MAX, ..Dcqcn::published(LINE_BPS) };
    let mut rate = DcqcnRate::new(&constants);
    rate.on_cnp(at_ns(0), &constants);
    for packet in 1..=5000_u32 {
        rate.on_sent(at_ns(0), 1000, &constants);
        let expected = 100.0 - 50.0 / f64::from(1_u32 << (packet / 1000));
        assert!((gbps(&rate) - expected).abs() < 1e-3, "{packet}");
    }
    assert_eq!((rate.byte_stage, rate.timer_stage), (5, 0));
}

#[test]
fn timers_cut_the_rate_once_per_period_and_keep_the_target_until_an_increase() {
    let constants = Dcqcn::scaled(LINE_BPS, LINE_BPS);
    let mut rate = DcqcnRate::new(&constants);
    rate.on_cnp(at_ns(1000), &constants);
    rate.on_sent(at_ns(4999), 1000, &constants);
    // The first cut waits for the decrease period.
    assert_close(gbps(&rate), 100.0);
    rate.on_sent(at_ns(5000), 1000, &constants);
    // Four periods of alpha without another notification.
    let alpha = (255.0_f64 / 256.0).powi(4);
    assert!((gbps(&rate) - 100.0 * (1.0 - alpha / 2.0)).abs() < 1e-3, "{}", gbps(&rate));
    // Notifications in a period cut once.
    let before = gbps(&rate);
    for ns in [5100, 5200, 6300] {
        rate.on_cnp(at_ns(ns), &constants);
    }
    rate.advance(at_ns(9000), &constants);
    let alpha = f64::from(rate.alpha);
    assert!((gbps(&rate) - before * (1.0 - alpha / 2.0)).abs() < 1e-3, "{}", gbps(&rate));
    assert_eq!(rate.target_bps, LINE_BPS as f32, "no increase came between the cuts");
    // The first increase goes halfway to the target; a cut after it sets the target.
    let before = gbps(&rate);
    rate.advance(at_ns(9000 + 300_000), &constants);
    assert!((gbps(&rate) - (before + 100.0) / 2.0).abs() < 1e-3);
    let before = rate.bps;
    rate.on_cnp(at_ns(309_500), &constants);
    rate.advance(at_ns(313_000), &constants);
    assert_eq!(rate.target_bps, before);
}

/// A model that shares no code: it looks at every nanosecond at which a timer of HPCC's simulator expires.
struct Model {
    gbps: f64,
    target: f64,
    alpha: f64,
    first: Option<u64>,
    increase_at: u64,
    stage: u32,
    alpha_notified: bool,
    decrease_notified: bool,
}

impl Model {
    fn cnp(&mut self, ns: u64) {
        if self.first.is_none() {
            (self.first, self.decrease_notified) = (Some(ns), true);
        } else {
            (self.alpha_notified, self.decrease_notified) = (true, true);
        }
    }

    fn tick(&mut self, ns: u64) {
        let Some(first) = self.first.filter(|first| ns > *first) else { return };
        if self.increase_at == ns {
            if self.stage >= 1 {
                self.target = f64::min(self.target + if self.stage == 1 { 0.02 } else { 0.2 }, 100.0);
            }
            self.gbps = (self.gbps + self.target) / 2.0;
            self.stage += 1;
            self.increase_at += 300_000;
        }
        if (ns - first).is_multiple_of(1000) {
            self.alpha *= 255.0 / 256.0;
            self.alpha += if self.alpha_notified { 1.0 / 256.0 } else { 0.0 };
            self.alpha_notified = false;
        }
        if (ns - first).is_multiple_of(4000) && self.decrease_notified {
            if self.stage > 0 {
                self.target = self.gbps;
            }
            self.gbps = f64::max(self.gbps * (1.0 - self.alpha / 2.0), 0.1);
            (self.stage, self.decrease_notified, self.increase_at) = (0, false, ns + 300_000);
        }
    }
}

#[test]
fn random_notifications_give_the_rates_of_a_separate_model() {
    let constants = Dcqcn::scaled(LINE_BPS, LINE_BPS);
    for seed in 0..4 {
        let mut random = sim::Random::new(seed, "dcqcn");
        let mut rate = DcqcnRate::new(&constants);
        let mut model = Model {
            gbps: 100.0,
            target: 100.0,
            alpha: 1.0,
            first: None,
            increase_at: 0,
            stage: 0,
            alpha_notified: false,
            decrease_notified: false,
        };
        // The sender looks at its rate at other times than those of notifications. Gaps are short and long.
        let mut ns = 0;
        for _ in 0..100 {
            let gap = [3_000, 100_000, 1_500_000][random.below(3) as usize];
            let next = (ns + 1 + random.below(gap)) / 10 * 10 + 7;
            for ns in ns + 1..=next {
                model.tick(ns);
            }
            ns = next.max(ns);
            if random.chance(0.7) {
                rate.on_cnp(at_ns(ns + 1), &constants);
                model.tick(ns + 1);
                model.cnp(ns + 1);
                ns += 1;
            } else {
                rate.on_sent(at_ns(ns), 1000, &constants);
            }
            let found = gbps(&rate);
            assert!((found - model.gbps).abs() < 1e-3 * model.gbps, "seed {seed}, {ns} ns: {found} {}", model.gbps);
        }
    }
}

#[test]
fn a_long_idle_time_costs_no_more_than_the_steps_to_the_line_rate() {
    let constants = Dcqcn::scaled(LINE_BPS, LINE_BPS);
    let mut rate = DcqcnRate::new(&constants);
    rate.on_cnp(at_ns(0), &constants);
    rate.advance(at_ns(3_600_000_000_000), &constants);
    assert_close(gbps(&rate), 100.0);
    assert_eq!(rate.alpha, 0.0);
}
