// Arrays from files, for requests: `.npy` of floats, or JSON.

const DTYPES = { "<f2": "float16", "<f4": "float32", "<f8": "float64" };

/** The array of a file, as a request has it. Throws an error that says what the file lacks. */
export async function arrayOf(file) {
  const bytes = new Uint8Array(await file.arrayBuffer());
  if (bytes[0] === 0x93) return npy(bytes);
  let value;
  try {
    value = JSON.parse(new TextDecoder().decode(bytes));
  } catch {
    throw new Error(`${file.name}: expected an .npy file, or a list of numbers in JSON`);
  }
  if (!Array.isArray(value)) throw new Error(`${file.name}: expected a list of numbers`);
  return value;
}

/** An `.npy` file as `{dtype, shape, base64}`. */
export function npy(bytes) {
  const view = new DataView(bytes.buffer, bytes.byteOffset);
  const wide = bytes[6] > 1;
  const begin = wide ? 12 : 10;
  const length = wide ? view.getUint32(8, true) : view.getUint16(8, true);
  const header = new TextDecoder("latin1").decode(bytes.subarray(begin, begin + length));
  const descr = /'descr': *'([^']*)'/.exec(header)?.[1];
  const shape = /'shape': *\(([^)]*)\)/.exec(header)?.[1];
  if (!(descr in DTYPES) || shape === undefined) throw new Error("expected an .npy file of little-endian floats");
  if (/'fortran_order': *True/.test(header)) throw new Error("expected an .npy file in C order");
  const sizes = shape.split(",").filter((part) => part.trim());
  return { dtype: DTYPES[descr], shape: sizes.map(Number), base64: base64(bytes.subarray(begin + length)) };
}

function base64(bytes) {
  let text = "";
  for (let at = 0; at < bytes.length; at += 32768) text += String.fromCharCode(...bytes.subarray(at, at + 32768));
  return btoa(text);
}
