//! Tests of the filter on bodies, frame by frame.

use super::*;

fn frame(kind: u8, channel: u16, content: &[u8]) -> Vec<u8> {
    let size = (content.len() as u32).to_be_bytes();
    [&[kind], channel.to_be_bytes().as_slice(), &size, content, &[FRAME_END]].concat()
}

/// A content header of the class `basic`, with two bytes of property flags.
fn header(channel: u16, body_bytes: usize) -> Vec<u8> {
    let size = (body_bytes as u64).to_be_bytes();
    frame(HEADER, channel, &[&[0, 60, 0, 0], size.as_slice(), &[0, 0]].concat())
}

fn body(length: usize) -> Vec<u8> {
    (0..length).map(|at| (at % 251) as u8).collect()
}

fn body_frames(channel: u16, body: &[u8], frame_bytes: usize) -> Vec<Vec<u8>> {
    body.chunks(frame_bytes).map(|part| frame(BODY, channel, part)).collect()
}

/// Returns the output for an input that arrives in pieces of this length.
fn filtered(input: &[u8], piece: usize) -> Vec<u8> {
    let (mut filter, mut output) = (FrameFilter::default(), Vec::new());
    input.chunks(piece).for_each(|part| filter.filter(part, &mut output));
    output
}

/// Returns the contents of the body frames of a channel.
fn body_of(mut frames: &[u8], channel: u16) -> Vec<u8> {
    let mut found = Vec::new();
    while !frames.is_empty() {
        let size = u32::from_be_bytes(frames[3..7].try_into().unwrap()) as usize;
        if frames[0] == BODY && frames[1..3] == channel.to_be_bytes() {
            found.extend_from_slice(&frames[7..7 + size]);
        }
        assert_eq!(frames[7 + size], FRAME_END);
        frames = &frames[8 + size..];
    }
    found
}

#[test]
fn complete_bodies_and_other_frames_are_unchanged() {
    let content = body(BODY_BYTES_MAX);
    let mut input = [frame(METHOD, 1, b"deliver"), header(1, content.len())].concat();
    input.extend(body_frames(1, &content, 128 * 1024 - 8).concat());
    input.extend([frame(HEARTBEAT, 0, b""), header(1, 0), frame(METHOD, 1, b"")].concat());
    for piece in [1, 7, 1_000, input.len()] {
        assert_eq!(filtered(&input, piece), input, "in pieces of {piece}");
    }
    assert_eq!(filtered(b"AMQP\0\0\x09\x01", 3), b"AMQP\0\0\x09\x01", "another version of the protocol");
}

#[test]
fn an_oversized_body_is_shortened_and_has_its_size_and_digest() {
    for (length, frame_bytes) in
        [(BODY_BYTES_MAX + 1, 100_000), (3 * BODY_BYTES_MAX, BODY_BYTES_MAX), (3_000_000, 4_088)]
    {
        let content = body(length);
        let input = [header(5, length), body_frames(5, &content, frame_bytes).concat(), header(5, 0)].concat();
        for piece in [997, input.len()] {
            let output = filtered(&input, piece);
            let announced = u64::from_be_bytes(output[11..19].try_into().unwrap()) as usize;
            let mut received = body_of(&output, 5);
            assert_eq!((announced, received.len()), (BODY_BYTES_MAX + TRAILER_BYTES, announced));
            let oversized = OversizedBody::split_from(&mut received).unwrap();
            let expected = OversizedBody { bytes: length as u64, sha256: Sha256::digest(&content).into() };
            assert_eq!(oversized, expected);
            assert_eq!(received, content[..BODY_BYTES_MAX]);
            assert!(output.ends_with(&header(5, 0)), "the next message is unchanged");
        }
    }
}

#[test]
fn channels_and_heartbeats_may_alternate_within_an_oversized_body() {
    let (large, small) = (body(BODY_BYTES_MAX + 100), body(500));
    let mut input = [header(1, large.len()), header(2, small.len())].concat();
    for (at, part) in body_frames(1, &large, 50_000).into_iter().enumerate() {
        input.extend([part, frame(HEARTBEAT, 0, b"")].concat());
        if at == 3 {
            input.extend(frame(BODY, 2, &small));
        }
    }
    let output = filtered(&input, 333);
    assert_eq!(body_of(&output, 2), small);
    assert!(OversizedBody::split_from(&mut body_of(&output, 1)).is_some());
}

#[test]
fn a_body_that_ends_with_its_channel_does_not_affect_the_next_one() {
    let content = body(100);
    let mut input = [header(1, 2 * BODY_BYTES_MAX), frame(BODY, 1, &content)].concat();
    input.extend([frame(METHOD, 1, b"close"), header(1, 100), frame(BODY, 1, &content)].concat());
    let output = filtered(&input, 64);
    assert_eq!(body_of(&output, 1), [content.clone(), content].concat());
}
