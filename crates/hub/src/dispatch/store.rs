//! SQL of the dispatcher: what it reads for subscriber queues, and what it saves of them.

pub(crate) mod reads;
pub(crate) mod writes;
