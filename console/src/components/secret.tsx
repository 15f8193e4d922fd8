import { CopyButton } from "./basics";

/** A secret that the API shows once. */
export function SecretNotice({ secret, what, onClose }: { secret: string; what: string; onClose: () => void }) {
  return (
    <div class="secret" role="status">
      <strong>Copy the {what} now: it is shown only once.</strong>
      <span class="copy-text"><code>{secret}</code><CopyButton text={secret} label={`Copy the ${what}`} /></span>
      <div class="row"><button type="button" class="button small" onClick={onClose}>I have stored it</button></div>
    </div>
  );
}
