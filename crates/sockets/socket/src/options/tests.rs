//! Tests of option records, compared with the kernel's own sockets.

use super::values::linger;
use super::*;
use crate::process::socket_option::get_raw;
use proptest::prelude::*;

fn set(record: &mut OptionRecord, option: SocketOption, value: &[u8]) -> Result<(), Errno> {
    // SAFETY: pointer and length are those of a slice.
    unsafe { record.set_c(Family::V4, option, value.as_ptr().cast(), value.len() as u32) }
}

fn get(record: &OptionRecord, family: Family, option: SocketOption, room: usize) -> Result<Vec<u8>, Errno> {
    let mut value = vec![0xaa_u8; room];
    let mut length = room as u32;
    // SAFETY: pointer and length are those of a vector.
    unsafe { record.get_c(family, option, value.as_mut_ptr().cast(), &raw mut length) }?;
    value.truncate(length as usize);
    Ok(value)
}

fn int(value: i32) -> [u8; 4] {
    value.to_ne_bytes()
}

/// Returns the kernel's answer to the same steps on a TCP socket.
fn kernel(steps: &[(SocketOption, &[u8])], ask: SocketOption, room: usize) -> Result<Vec<u8>, Errno> {
    let socket = rustix::net::socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
    for (option, value) in steps {
        set_raw(socket.as_fd(), *option, value)?;
    }
    let mut value = vec![0xaa_u8; room];
    let length = get_raw(socket.as_fd(), ask, &mut value)?;
    value.truncate(length);
    Ok(value)
}

const NODELAY: SocketOption = SocketOption::tcp(libc::TCP_NODELAY);
const RCVBUF: SocketOption = SocketOption::socket(libc::SO_RCVBUF);
const TOS: SocketOption = SocketOption { level: libc::IPPROTO_IP, name: libc::IP_TOS };
const PRIORITY: SocketOption = SocketOption::socket(libc::SO_PRIORITY);
const KEEPIDLE: SocketOption = SocketOption::tcp(libc::TCP_KEEPIDLE);

#[test]
fn options_read_back_as_from_the_kernel() {
    let steps: [(SocketOption, &[u8]); 5] =
        [(NODELAY, &int(7)), (RCVBUF, &int(50_000)), (TOS, &int(0x10)), (KEEPIDLE, &int(33)), (RCVBUF, &int(60_000))];
    let mut record = OptionRecord::default();
    for (option, value) in steps {
        set(&mut record, option, value).unwrap();
    }
    for option in [NODELAY, RCVBUF, TOS, KEEPIDLE, PRIORITY, SocketOption::socket(libc::SO_TYPE)] {
        for room in [0, 1, 2, 4, 8] {
            assert_eq!(get(&record, Family::V4, option, room), kernel(&steps, option, room), "{option:?} {room}");
        }
    }
    assert_eq!(get(&record, Family::V4, RCVBUF, 4).unwrap(), int(120_000), "Linux doubles buffers");
    assert_eq!(record.find(RCVBUF), Some(&int(60_000)[..]));
}

#[test]
fn the_template_has_the_family_of_the_socket() {
    let record = OptionRecord::default();
    let domain = SocketOption::socket(libc::SO_DOMAIN);
    assert_eq!(get(&record, Family::V4, domain, 4).unwrap(), int(libc::AF_INET));
    assert_eq!(get(&record, Family::V6, domain, 4).unwrap(), int(libc::AF_INET6));
    let v6only = SocketOption { level: libc::IPPROTO_IPV6, name: libc::IPV6_V6ONLY };
    assert!(get(&record, Family::V6, v6only, 4).is_ok());
}

#[test]
fn errors_are_the_kernels_and_leave_no_record() {
    let mut record = OptionRecord::default();
    for (option, value) in [
        (SocketOption::tcp(9999), &int(1)[..]),
        (SocketOption { level: 9999, name: 1 }, &int(1)),
        (NODELAY, &int(1)[..2]),
        (KEEPIDLE, &int(-1)),
        (SocketOption::socket(libc::SO_TYPE), &int(1)),
    ] {
        let expected = kernel(&[(option, value)], NODELAY, 4).unwrap_err();
        assert_eq!(set(&mut record, option, value), Err(expected), "{option:?}");
        assert_eq!(record.find(option), None);
    }
    // SAFETY: `value` is null, which the kernel refuses.
    let null = unsafe { record.set_c(Family::V4, NODELAY, std::ptr::null(), 4) };
    assert_eq!(null, Err(Errno::FAULT));
    assert!(get(&record, Family::V4, SocketOption::tcp(9999), 4).is_err());
}

#[test]
fn options_that_a_lane_cannot_honour_are_refused() {
    let mut record = OptionRecord::default();
    assert_eq!(set(&mut record, SocketOption::socket(libc::SO_ZEROCOPY), &int(1)), Err(Errno::OPNOTSUPP));
    assert_eq!(set(&mut record, SocketOption::socket(libc::SO_ZEROCOPY), &int(0)), Ok(()));
    assert_eq!(set(&mut record, SocketOption::socket(libc::SO_PEEK_OFF), &int(0)), Err(Errno::OPNOTSUPP));
    assert_eq!(set(&mut record, SocketOption::socket(libc::SO_PEEK_OFF), &int(-1)), Ok(()));
    assert_eq!(set(&mut record, SocketOption::tcp(libc::TCP_ULP), b"tls"), Err(Errno::NOENT));
}

#[test]
fn a_record_is_bounded_and_holds_each_option_once() {
    let mut record = OptionRecord::default();
    for round in 0..3 {
        for name in 0..2 * RECORDS_MAX as i32 {
            record.note(SocketOption::tcp(100 + name), &int(round));
        }
    }
    assert_eq!(record.records.len(), RECORDS_MAX);
    record.note(NODELAY, &[0; VALUE_BYTES_MAX + 1]);
    assert_eq!(record.find(NODELAY), None);
}

#[test]
fn filters_are_not_played_back() {
    let mut record = OptionRecord::default();
    record.note(SocketOption::socket(libc::SO_ATTACH_FILTER), &[0; 16]);
    assert!(record.records.is_empty());
}

#[test]
fn time_outs_and_linger_are_parsed() {
    let mut record = OptionRecord::default();
    assert_eq!((record.receive_timeout_ns(), record.receive_timeout_ms(), record.resets_on_close()), (0, None, false));
    set(&mut record, SocketOption::socket(libc::SO_RCVTIMEO), &timeval(1_500_001_000)).unwrap();
    set(&mut record, SocketOption::socket(libc::SO_SNDTIMEO), &timeval(2_000)).unwrap();
    assert_eq!((record.receive_timeout_ns(), record.receive_timeout_ms()), (1_500_001_000, Some(1501)));
    assert_eq!(record.send_timeout_ns(), 2_000);
    set(&mut record, LINGER[0], &linger(Some(5))).unwrap();
    assert_eq!((record.linger_seconds(), record.resets_on_close()), (Some(5), false));
    set(&mut record, LINGER[0], &linger(Some(0))).unwrap();
    assert!(record.resets_on_close());
    set(&mut record, LINGER[0], &linger(None)).unwrap();
    assert_eq!((record.linger_seconds(), record.resets_on_close()), (None, false));
}

#[test]
fn a_lane_holds_what_both_buffers_of_tcp_would() {
    let limits = BufferLimits::of_kernel();
    let mut record = OptionRecord::default();
    assert_eq!(record.send_capacity_bytes(), limits.send_bytes_grown + limits.send_bytes_grown / MARGIN_SHARE);
    assert!(record.receive_capacity_bytes() > limits.receive_bytes);
    assert!(record.send_buffer_bytes_established().is_some_and(|bytes| bytes > 0));
    record.note(RECEIVE_BUFFERS[0], &int(4096));
    assert_eq!(record.receive_capacity_bytes(), 8192 + 8192 / MARGIN_SHARE + 4096);
    record.note(SEND_BUFFERS[0], &int(i32::MAX));
    assert_eq!(record.send_capacity_bytes(), 2 * limits.send_bytes_max * (MARGIN_SHARE + 1) / MARGIN_SHARE);
    assert_eq!(record.send_buffer_bytes_established(), None);
}

#[test]
fn the_later_of_two_names_for_an_option_counts() {
    let mut record = OptionRecord::default();
    record.note(SEND_BUFFERS[0], &int(8192));
    record.note(SEND_BUFFERS[1], &int(100_000));
    assert_eq!(record.send_capacity_bytes(), 200_000 + 200_000 / MARGIN_SHARE);
    record.note(SEND_BUFFERS[0], &int(1));
    assert_eq!(record.send_capacity_bytes(), SEND_BUFFER_BYTES_MIN + SEND_BUFFER_BYTES_MIN / MARGIN_SHARE);
    record.note(RECEIVE_TIMEOUTS[1], &timeval(5_000_000));
    record.note(RECEIVE_TIMEOUTS[0], &timeval(7_000_000));
    assert_eq!(record.receive_timeout_ns(), 7_000_000);
    record.note(RECEIVE_TIMEOUTS[1], &timeval(9_000_000));
    assert_eq!(record.receive_timeout_ns(), 9_000_000);
}

proptest! {
    #[test]
    fn any_bytes_are_a_time_out_or_none(value in prop::collection::vec(any::<u8>(), 0..20)) {
        let parsed = parse_timeval_ns(&value);
        prop_assert!(value.len() >= 16 || parsed.is_none());
        let _ = parse_linger(&value);
    }

    #[test]
    fn a_time_out_survives_its_structure(micros in 0..u64::MAX / 1000) {
        prop_assert_eq!(parse_timeval_ns(&timeval(micros * 1000)), Some(micros * 1000));
    }

    #[test]
    fn a_linger_survives_its_structure(seconds in prop::option::of(0..i32::MAX as u32)) {
        prop_assert_eq!(parse_linger(&linger(seconds)), Some(seconds));
    }
}

#[test]
fn a_negative_time_expires_at_once() {
    let mut value = timeval(0);
    value[..8].copy_from_slice(&(-1_i64).to_ne_bytes());
    assert_eq!(parse_timeval_ns(&value), Some(1));
}

#[test]
fn answers_are_cut_to_the_callers_length() {
    for room in 0..8_u32 {
        let mut value = [0xaa_u8; 8];
        let mut length = room;
        // SAFETY: `value` has eight bytes, and `length` is a local variable.
        unsafe { write_value(&[1, 2, 3, 4], value.as_mut_ptr().cast(), &raw mut length) }.unwrap();
        let written = room.min(4) as usize;
        assert_eq!((length as usize, &value[..written]), (written, &[1, 2, 3, 4][..written]));
        assert!(value[written..].iter().all(|byte| *byte == 0xaa));
    }
    let mut length = u32::MAX;
    // SAFETY: `answer` refuses a negative length and null pointers before it writes.
    unsafe {
        assert_eq!(write_value(&[1], std::ptr::dangling_mut(), &raw mut length), Err(Errno::INVAL));
        assert_eq!(write_value(&[1], std::ptr::null_mut(), std::ptr::null_mut()), Err(Errno::FAULT));
        length = 1;
        assert_eq!(write_value(&[1], std::ptr::null_mut(), &raw mut length), Err(Errno::FAULT));
    }
}

#[test]
fn tcp_info_has_the_layout_of_libc() {
    let facts =
        TcpInfo { state: TcpState::Established, rtt_us: 3, bytes_acked: 11, bytes_received: 12, bytes_unsent: 13 };
    let bytes = tcp_info(&facts);
    // SAFETY: libc's `tcp_info` consists of integers and is shorter than `bytes`.
    let info: libc::tcp_info = unsafe { std::ptr::read_unaligned(bytes.as_ptr().cast()) };
    assert_eq!((info.tcpi_state, info.tcpi_snd_mss, info.tcpi_rtt), (1, 65_483, 3));
    assert_eq!((info.tcpi_advmss, info.tcpi_rcv_mss, info.tcpi_snd_cwnd), (65_483, 65_483, 10));
    let kernels = kernel(&[], SocketOption::tcp(libc::TCP_INFO), 512).unwrap();
    assert!(kernels.len() >= 104 && TCP_INFO_BYTES >= 104);
}

#[test]
fn a_record_tells_whether_lanes_lack_a_requested_option() {
    let asks = |option: SocketOption, value: i32| {
        let mut record = OptionRecord::default();
        record.note(option, &int(value));
        record.needs_kernel_tcp()
    };
    for option in [SocketOption::socket(libc::SO_ZEROCOPY), TIMESTAMPING[0], TIMESTAMPING[1]] {
        assert!(asks(option, 1));
        assert!(!asks(option, 0));
    }
    assert!(!asks(TIMESTAMPING[0], libc::SOF_TIMESTAMPING_RX_SOFTWARE as i32));
    assert!(!asks(SocketOption::tcp(libc::TCP_INQ), 1));
    assert!(asks(SocketOption::socket(libc::SO_PEEK_OFF), 0));
    assert!(!asks(SocketOption::socket(libc::SO_PEEK_OFF), -1));
    assert!(!asks(SocketOption::socket(libc::SO_KEEPALIVE), 1));
}
