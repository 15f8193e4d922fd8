//! Makes the texts in a frame valid before lapin decodes them.
//!
//! AMQP's short strings are bytes: a publisher can put anything into a routing key, a property or the name of a header.
//! lapin requires UTF-8 and ends the connection otherwise, and RabbitMQ would deliver the same message again for ever. It
//! also decodes nested tables recursively, as deep as a publisher nests them. So this module replaces the bytes of an invalid
//! text by NUL, which no valid id or type contains, and turns nested values, which nothing here reads, into byte arrays. The
//! length of the frame stays the same. The reader of the message finds the NUL, and refuses the message with the name of the
//! field.

/// Class and method of `basic.deliver`.
const DELIVER: [u8; 4] = [0, 60, 0, 60];
/// Class, weight and size of the body, which precede the property flags.
const CONTENT_HEAD_BYTES: usize = 12;

/// What a property is, in the order of the flags from the highest bit.
#[derive(Clone, Copy)]
enum Property {
    Text,
    Table,
    Bytes(usize),
}

/// content_type, content_encoding, headers, delivery_mode, priority, correlation_id, reply_to, expiration, message_id,
/// timestamp, type, user_id, app_id, cluster_id.
const PROPERTIES: [Property; 14] = {
    use Property::{Bytes, Table, Text};
    [Text, Text, Table, Bytes(1), Bytes(1), Text, Text, Text, Text, Bytes(8), Text, Text, Text, Text]
};

/// Makes the texts of a method valid. Only those of `basic.deliver` are a publisher's.
pub(crate) fn make_method_valid(content: &mut [u8]) {
    if let Some((method, fields)) = content.split_first_chunk_mut()
        && *method == DELIVER
    {
        let mut fields = Fields(fields);
        // The tag of the consumer; the tag of the delivery and whether it is repeated; the exchange; the routing key.
        let _ =
            fields.text().and_then(|()| fields.next_bytes(9)).and_then(|_| fields.text()).and_then(|()| fields.text());
    }
}

/// Makes the texts of a content header valid. RabbitMQ has decoded the properties, so they are complete.
pub(crate) fn make_header_valid(content: &mut [u8]) {
    let Some((flags, properties)) = content.get_mut(CONTENT_HEAD_BYTES..).and_then(|rest| rest.split_first_chunk_mut())
    else {
        return;
    };
    let (flags, mut fields) = (u16::from_be_bytes(*flags), Fields(properties));
    for (_, property) in PROPERTIES.into_iter().enumerate().filter(|(at, _)| flags & (0x8000 >> at) != 0) {
        let valid = match property {
            Property::Text => fields.text(),
            Property::Table => fields.table(),
            Property::Bytes(count) => fields.next_bytes(count).map(drop),
        };
        if valid.is_none() {
            return;
        }
    }
}

/// The fields that are left. Each method takes one from the beginning, and returns None if it is not complete.
struct Fields<'a>(&'a mut [u8]);

impl<'a> Fields<'a> {
    fn next_bytes(&mut self, count: usize) -> Option<&'a mut [u8]> {
        if count > self.0.len() {
            return None;
        }
        let (taken, rest) = std::mem::take(&mut self.0).split_at_mut(count);
        self.0 = rest;
        Some(taken)
    }

    fn length(&mut self) -> Option<usize> {
        let length = self.next_bytes(4)?;
        Some(u32::from_be_bytes(length.try_into().ok()?) as usize)
    }

    fn text(&mut self) -> Option<()> {
        let length = usize::from(self.next_bytes(1)?[0]);
        let text = self.next_bytes(length)?;
        if std::str::from_utf8(text).is_err() {
            text.iter_mut().filter(|byte| !byte.is_ascii()).for_each(|byte| *byte = 0);
        }
        Some(())
    }

    fn table(&mut self) -> Option<()> {
        let length = self.length()?;
        let mut entries = Fields(self.next_bytes(length)?);
        while !entries.0.is_empty() {
            entries.text()?;
            entries.value()?;
        }
        Some(())
    }

    fn value(&mut self) -> Option<()> {
        let kind = &mut self.next_bytes(1)?[0];
        let length = match kind {
            // A table and an array have the same form as a byte array: the length, then the content.
            b'F' | b'A' => {
                *kind = b'x';
                self.length()?
            }
            b'S' | b'x' => self.length()?,
            b't' | b'b' | b'B' => 1,
            b's' | b'U' | b'u' => 2,
            b'I' | b'i' | b'f' => 4,
            b'D' => 5,
            b'l' | b'L' | b'd' | b'T' => 8,
            b'V' => 0,
            _ => return None,
        };
        self.next_bytes(length).map(drop)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn short(text: &[u8]) -> Vec<u8> {
        [&[text.len() as u8], text].concat()
    }

    fn long(text: &[u8]) -> Vec<u8> {
        [(text.len() as u32).to_be_bytes().as_slice(), text].concat()
    }

    /// A content header with all properties. Each text is `text`.
    fn header(text: &[u8], table: &[u8]) -> Vec<u8> {
        let mut content = [[0_u8; CONTENT_HEAD_BYTES].as_slice(), &[0xFF, 0xFC]].concat();
        for property in PROPERTIES {
            match property {
                Property::Text => content.extend(short(text)),
                Property::Table => content.extend(long(table)),
                Property::Bytes(count) => content.extend(vec![0xFF; count]),
            }
        }
        content
    }

    #[test]
    fn every_invalid_text_of_the_properties_becomes_nul_and_nothing_else_changes() {
        let numbers = [
            b"b\xFF".as_slice(),
            b"s\xFF\xFF",
            b"I\xFF\xFF\xFF\xFF",
            b"D\xFF\xFF\xFF\xFF\xFF",
            b"T\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFF",
        ];
        let mut table: Vec<u8> = numbers.iter().flat_map(|value| [short(b"n"), value.to_vec()].concat()).collect();
        table.extend(
            [short(b"text"), b"S".to_vec(), long(b"\xFF is not a name"), short(b"void"), b"V".to_vec()].concat(),
        );
        let valid = header("a valid té\u{301}xt".as_bytes(), &table);
        let mut unchanged = valid.clone();
        make_header_valid(&mut unchanged);
        assert_eq!(unchanged, valid);

        let entry = |name: &[u8]| [table.clone(), short(name), b"t\x01".to_vec()].concat();
        let mut changed = header(b"a\xFFb\xC3", &entry(b"\xF0name"));
        make_header_valid(&mut changed);
        assert_eq!(changed, header(b"a\0b\0", &entry(b"\0name")));
    }

    #[test]
    fn nested_values_become_byte_arrays_however_deep_they_are() {
        let deep = (0..10_000).fold(Vec::new(), |inner, _| [b"A".to_vec(), long(&inner)].concat());
        let table = |kind: u8| [short(b"x"), vec![kind], deep[1..].to_vec(), short(b"y"), b"t\x01".to_vec()].concat();
        for kind in [b'A', b'F'] {
            let mut content = header(b"text", &table(kind));
            make_header_valid(&mut content);
            assert_eq!(content, header(b"text", &table(b'x')));
        }
    }

    #[test]
    fn the_routing_key_and_the_exchange_of_a_delivery_are_made_valid() {
        let deliver = |text: &[u8]| [DELIVER.to_vec(), short(b"tag"), vec![0xFF; 9], short(text), short(text)].concat();
        let mut content = deliver(b"k\xFE");
        make_method_valid(&mut content);
        assert_eq!(content, deliver(b"k\0"));
        let mut other = [vec![0, 10, 0, 10], short(b"\xFF")].concat();
        let expected = other.clone();
        make_method_valid(&mut other);
        assert_eq!(other, expected, "another method");
    }

    #[test]
    fn incomplete_fields_are_passed_on() {
        let complete = header(b"text", &[short(b"x"), b"A".to_vec(), long(b"t\x01")].concat());
        for length in 0..complete.len() {
            make_header_valid(&mut complete[..length].to_vec());
            make_method_valid(&mut complete[..length].to_vec());
        }
        let mut unknown = header(b"text", &[short(b"x"), b"?".to_vec()].concat());
        make_header_valid(&mut unknown);
    }
}
